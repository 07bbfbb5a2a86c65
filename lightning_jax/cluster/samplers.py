"""Samplers of a run: placed and supervised by the run's process, which opens rollouts at them."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_jax.cluster.actor import SamplerActor
from lightning_jax.cluster.delivery import Parcel, Receipt, store_parcel
from lightning_jax.cluster.placing import end_actors, last_line, result_of, start_actor
from lightning_jax.cluster.ray_session import ClusterError
from lightning_jax.cluster.sampler import SamplerSpec
from lightning_jax.engine.admission import join_stats
from lightning_jax.gateway.app import RolloutSettings, Traffic
from lightning_jax.gateway.metrics import PRESENT
from lightning_jax.gateway.sessions.waits import Lost
from lightning_jax.models.formats.param_names import ParamPath
from lightning_jax.models.reshard import HostWeights, copy_to_host
from lightning_jax.models.transformer import Params
from lightning_jax.rollouts.servers import OpenedRollout
from lightning_jax.settings import ConfigError
from lightning_jax.system.clock import backoff_s
from lightning_jax.traces.store import Store
from lightning_jax.train.config import ClusterConfig

log = logging.getLogger(__name__)

QUIET_S = 30.0  # without an answer, after which a sampler is lost; it answers every second
END_S = 5.0  # for a sampler to end its calls when the run ends
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0  # before a sampler is started again
NUMBER, LOST = "serve/samplers", "serve/samplers_lost"


@dataclass(eq=False)
class ServingSampler:
    """Sampler that serves, with the rollouts that are open there."""

    index: int
    actor: Any
    stats: dict[str, float]
    rollouts: dict[str, str] = field(default_factory=dict)  # id -> group
    over: frozenset[str] = frozenset()  # root spans of those that get no more answers
    loss: str | None = None
    is_lost: asyncio.Event = field(default_factory=asyncio.Event)

    def how_lost(self) -> str | None:
        return self.loss

    def lose(self, loss: str) -> None:
        """Note how it was lost, unless that is known."""
        self.loss = self.loss or loss
        self.is_lost.set()


@dataclass
class StoredWeights:
    """Newest weights of one policy, in Ray's object store.

    `changed` replaces some arrays of `whole`, or none if it is None.
    """

    whole: Any
    paths: frozenset[ParamPath]  # of the arrays of `whole`
    version: int
    changed: Any = None


class Samplers:
    """Samplers of one run. They end with it.

    A sampler that dies is replaced by a new one with the present weights. Until then its share of
    the rollouts goes to the others.
    """

    def __init__(self, ray: Any, config: ClusterConfig, run: str, store: Store) -> None:
        """`run` names the run in the cluster. Two runs with one name refuse each other."""
        self._ray, self._config, self._run = ray, config, run
        self._store = store
        self._weights: list[StoredWeights] = []  # of each policy
        self._lock = threading.Lock()  # of `_weights` and `_live`
        self._live: dict[int, ServingSampler] = {}
        self._changed = asyncio.Event()  # a sampler has come
        self._at: dict[str, ServingSampler] = {}  # by rollout
        self._roots: dict[str, str] = {}  # ids of root spans, by rollout
        self._ended: dict[str, float] = {}  # totals of samplers that ended
        self._num_lost = 0
        self._keeping: list[asyncio.Task[None]] = []

    async def start(
        self,
        spec: SamplerSpec,
        weights: Iterable[tuple[int, HostWeights]],
    ) -> None:
        """Place all samplers and wait until they serve these weights, each with its version.

        Raises ConfigError if the cluster is too small or another run has the samplers.
        """
        self._spec = spec
        for version, sent in weights:
            self._weights.append(StoredWeights(self._ray.put(sent), frozenset(sent), version))
        began = time.monotonic()
        starting = [asyncio.create_task(self._begin(i)) for i in range(self._config.samplers)]
        try:
            started = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        self._keeping = [asyncio.create_task(self._keep(live)) for live in started]
        log.info("samplers ready: %d, after %.0f s", len(started), time.monotonic() - began)

    async def end(self) -> None:
        """End all samplers."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await end_actors(self._ray, [live.actor for live in self._live.values()], END_S)

    # Methods of a RolloutServer.

    async def open(self, settings: RolloutSettings, group_id: str) -> OpenedRollout:
        """Open a rollout at a sampler, where it stays.

        Raises ClusterError if no sampler is left and none comes within `cluster.timeout_s`.
        """
        rollout_id = settings.rollout_id
        while True:
            live = self._choose(group_id) or await self._any()
            live.rollouts[rollout_id] = group_id
            try:
                opened = await self._ask(live, "open", settings, group_id)
            except asyncio.CancelledError:
                live.rollouts.pop(rollout_id, None)
                live.actor.call.remote("close", rollout_id)
                raise
            if opened is not None:
                self._at[rollout_id], self._roots[rollout_id] = live, opened.root.span_id
                # This machine's clock may differ from the sampler's, and ends the span.
                root = replace(opened.root, start_ns=time.time_ns())
                return replace(opened, root=root, loss=live.how_lost)
            live.rollouts.pop(rollout_id, None)

    async def posted_reward(self, rollout_id: str) -> float | None:
        return await self._ask(self._at[rollout_id], "posted_reward", rollout_id)

    def is_over(self, rollout_id: str) -> bool:
        """Return what its sampler said last, which it does every second."""
        live = self._at.get(rollout_id)
        return live is not None and self._roots[rollout_id] in live.over

    async def lost(self, rollout_id: str) -> Lost:
        return await self._ask(self._at[rollout_id], "lost", rollout_id) or Lost()

    async def expire(self, rollout_id: str) -> None:
        await self._ask(self._at[rollout_id], "expire", rollout_id)

    async def close(self, rollout_id: str) -> Traffic:
        live = self._at.pop(rollout_id)
        del self._roots[rollout_id]
        live.rollouts.pop(rollout_id, None)
        traffic = await self._ask(live, "close", rollout_id)
        return traffic or Traffic((), num_cancelled=0, num_forgotten=0, loss=live.loss)

    def stats(self) -> dict[str, float]:
        """Return the counters of all samplers since the start, also of those that ended."""
        totals = join_stats([self._ended, *(live.stats for live in list(self._live.values()))])
        return {**totals, NUMBER: float(len(self._live)), LOST: float(self._num_lost)}

    # Weights. These methods are for any thread.

    def publish(self, params: Params | None, version: int, weights: int = 0) -> None:
        """Send new weights to all samplers and wait until they serve them.

        `weights` is their index. A sampler that cannot load them is replaced. With None the weights
        stay the same under the new version.
        """
        sent = None if params is None else copy_to_host(params, self._spec.dtype)
        ref = None if sent is None else self._ray.put(sent)
        with self._lock:
            stored = self._weights[weights]
            stored.version = version
            if sent is not None and stored.paths <= sent.keys():
                stored.whole, stored.changed = ref, None
            elif sent is not None:
                stored.changed = ref
            live = list(self._live.values())
        loading = {s.actor.call.remote("load", weights, ref, version): s for s in live}
        if not loading:
            return
        limit = self._config.timeout_s
        done, late = self._ray.wait(list(loading), num_returns=len(loading), timeout=limit)
        for call in late:
            self._lose_later(loading[call], f"took longer than {limit:g} s to load weights")
        for call in done:
            try:
                self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                self._lose_later(loading[call], f"could not load weights: {last_line(error)}")

    def _lose_later(self, live: ServingSampler, loss: str) -> None:
        live.loss = live.loss or loss  # at once, so that no rollout is opened there
        self._loop.call_soon_threadsafe(live.lose, loss)

    # Supervision.

    async def _begin(self, index: int) -> ServingSampler:
        """Place and start a sampler, and return it once it serves the newest weights."""
        self._loop = asyncio.get_running_loop()
        actor, host = await start_actor(
            self._ray, self._config, SamplerActor, index, self._run, self._config.sampler_env
        )
        try:
            with self._lock:
                versions = [stored.version for stored in self._weights]
                refs = [ref for stored in self._weights for ref in (stored.whole, stored.changed)]
            first = self._store.next_sequence()
            starting = actor.start.remote(self._spec, host, first, versions, *refs)
            try:
                stats = await result_of(starting)
            except self._ray.exceptions.RayError as error:
                raise ClusterError(
                    f"sampler {index} did not start: {last_line(error)}",
                    reason="not_started",
                    key="cluster.samplers",
                ) from error
            live = ServingSampler(index, actor, stats)
            while newer := self._join(live, versions):
                for policy, version, ref in newer:
                    versions[policy] = version
                    await result_of(actor.call.remote("load", policy, ref, version))
        except BaseException:
            self._ray.kill(actor)
            raise
        self._changed.set()
        return live

    def _join(self, live: ServingSampler, versions: Sequence[int]) -> list[tuple[int, int, Any]]:
        """Add a sampler with these weights, or return what it has to load first."""
        with self._lock:
            newer = [
                (policy, stored.version, stored.changed or stored.whole)
                for policy, stored in enumerate(self._weights)
                if stored.version != versions[policy]
            ]
            if not newer:
                self._live[live.index] = live
        return newer

    async def _keep(self, live: ServingSampler) -> None:
        """Store what a sampler records. If it is lost, start another in its place."""
        while True:
            await self._drain(live)
            with self._lock:
                del self._live[live.index]
            self._num_lost += 1
            past = {name: value for name, value in live.stats.items() if name not in PRESENT}
            self._ended = join_stats([self._ended, past])
            self._ray.kill(live.actor)
            log.warning(
                "sampler %d %s; %d rollouts are tried again, and another sampler is started",
                *(live.index, live.loss, len(live.rollouts)),
                extra={"event": "sampler_lost", "sampler": live.index},
            )
            num_failures, index = 0, live.index
            while index not in self._live:
                try:
                    live = await self._begin(index)
                except (ClusterError, ConfigError, self._ray.exceptions.RayError) as error:
                    log.warning("sampler %d is not back: %s", index, error)
                    num_failures += 1
                    await asyncio.sleep(backoff_s(num_failures, FIRST_DELAY_S, MAX_DELAY_S))
            log.info("sampler %d is back with the present weights", index)

    async def _drain(self, live: ServingSampler) -> None:
        receipts: list[Receipt] = []
        while live.loss is None:
            try:
                async with asyncio.timeout(QUIET_S):
                    parcel: Parcel = await result_of(live.actor.call.remote("take", receipts))
            except TimeoutError:
                live.lose(f"has not answered for {QUIET_S:g} s")
            except self._ray.exceptions.RayError as error:
                live.lose(f"was lost: {last_line(error)}")
            else:
                live.stats, live.over = parcel.stats, parcel.over
                receipts = await store_parcel(self._store, parcel.deliveries)
        live.lose(live.loss)

    # Choice of a sampler.

    def _choose(self, group_id: str) -> ServingSampler | None:
        """Return the sampler for a rollout: where others of its group are, else the least loaded.

        Rollouts of a group begin with the same prompt, which a sampler computes once.
        """
        able = [live for live in self._live.values() if live.loss is None]
        if not able:
            return None
        least = min(len(live.rollouts) for live in able)
        slack = max(1, self._spec.serve.slots // 4)

        def rank(live: ServingSampler) -> tuple[bool, int]:
            load = len(live.rollouts)
            has_group = group_id in live.rollouts.values() and load <= least + slack
            return not has_group, load

        return min(able, key=rank)

    async def _any(self) -> ServingSampler:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                while not (live := self._choose("")):
                    self._changed.clear()
                    await self._changed.wait()
                return live
        except TimeoutError:
            raise ClusterError(
                f"all {self._config.samplers} samplers are lost, and none came back within "
                f"cluster.timeout_s={self._config.timeout_s:g}; check the cluster's machines, then "
                "run the same command to resume.",
                reason="no_sampler",
                key="cluster.samplers",
            ) from None

    async def _ask(self, live: ServingSampler, method: str, *arguments: Any) -> Any:
        """Return what a method of a sampler returns, or None if it is lost first."""
        answer = result_of(live.actor.call.remote(method, *arguments))
        lost = asyncio.ensure_future(live.is_lost.wait())
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        except self._ray.exceptions.RayActorError as error:
            live.lose(f"was lost: {last_line(error)}")
            return None
        finally:
            lost.cancel()
            answer.cancel()
