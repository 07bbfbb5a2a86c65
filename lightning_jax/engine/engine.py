"""Model that answers requests on one or more groups of devices, while its weights change."""

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from jax.sharding import Mesh

from lightning_jax.engine.admission import LoopStatus, join_stats, join_statuses
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.generation import Generation
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.replicas import FAILED, Router, split_by_data
from lightning_jax.engine.response import TimeLimit
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.models.policies import ALL, Policy
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Params
from lightning_jax.settings.loading import load_function

log = logging.getLogger(__name__)

# Longest turn of a Python thread where an accelerator serves. The accelerator needs a millisecond
# or two for a decode step, in which the engine's thread asks for the interpreter several times.
# Beside a busy thread it would wait for up to 5 ms each time, which is Python's default.
SWITCH_S = 0.0005
SHARED = ("serve/compiles", "serve/compiling")  # counted by the programs, which all weights share


@dataclass(frozen=True)
class _Replicas:
    """Loops with the same weights on separate devices, each with slots and a cache of its own."""

    loops: Sequence[Any]
    router: Router
    are_counted: bool = True

    def stats(self) -> dict[str, float]:
        return join_stats([loop.stats() for loop in self.loops])


class Engine:
    """Model that answers requests with the newest weights published to it.

    `async with` starts the engine. It compiles programs when requests first need them, so the first
    request to a model that is new to the machine waits for seconds. The weights are copied, here
    and in `publish`, so the caller may donate them to the next train step. `dtype` is that of
    the copy, by default the model's. The mesh is by default `serve.mesh`, or all devices. `add`
    gives it the weights of other policies.

    The mesh's `data` axis gives the number of replicas of the weights. They share nothing: each has
    its own slots, prefix cache and thread, so none waits for another's prompts. A request goes to
    the replica that has read the start of its prompt before. Engines of models with equal shapes
    may share `programs`, which are compiled once. With `share_base` the caller promises never to
    donate the frozen weights of a model with adapters, and the engine uses them in place.
    """

    def __init__(
        self,
        model: LoadedModel,
        serve: ServeConfig | None = None,
        *,
        dtype: str | None = None,
        mesh: Mesh | None = None,
        version: int = 0,
        programs: Sequence[SlotPrograms] = (),
        share_base: bool = False,
    ) -> None:
        self.model_name, self.tokenizer = model.name, model.tokenizer
        self.serve = (serve or ServeConfig()).with_sizes(model.config.shape.max_positions)
        if not programs:
            dtype = dtype or str(model.params["embed"]["embedding"].dtype)
            programs = make_programs(model.config, self.serve, dtype=dtype, mesh=mesh)
        self._programs = programs[0]
        self.devices = {device for replica in programs for device in replica.devices}
        params = self._programs.prepare_copy(model.params, share_base=share_base)
        loop = _loop_type(self.serve)
        loops = [loop(p, params, version, model.tokenizer, self.serve) for p in programs]
        self._weights = [_Replicas(loops, Router(len(loops), self.serve.slots))]
        if len(loops) > 1:
            log.info(
                "serving the same weights on %d engines with %d slots each",
                len(loops),
                self.serve.slots,
            )

    def add(self, other: "Engine", *, are_counted: bool = True) -> None:
        """Answer with the weights of another engine, too, under the next index.

        Both share their programs, and neither has started. Each set of weights keeps its own slots
        and prefix cache. `stats` and `num_slots` leave out weights that are not counted.
        """
        self._weights += [replace(weights, are_counted=are_counted) for weights in other._weights]

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    @property
    def _loops(self) -> list[Any]:
        return [loop for weights in self._weights for loop in weights.loops]

    @property
    def version(self) -> int:
        """Version of the first weights that will answer the next request."""
        return self._weights[0].loops[-1].version

    @property
    def status(self) -> LoopStatus:
        """Status like `EngineLoop.status`: the first loop status that is not ok, if any."""
        return join_statuses(loop.status for loop in self._loops)

    @property
    def num_slots(self) -> int:
        """Number of requests that all replicas together decode at once."""
        counted = [weights.loops for weights in self._weights if weights.are_counted]
        return sum(loop.num_slots for loops in counted for loop in loops)

    @property
    def num_open(self) -> int:
        """Number of requests running or waiting."""
        return sum(loop.num_open for loop in self._loops)

    def warmup(self) -> None:
        """Compile all programs, for all replicas in parallel. Call before `start`.

        Blocks for minutes when a model of this shape is new to the machine.
        """
        with ThreadPoolExecutor(len(self._loops)) as pool:
            list(pool.map(lambda loop: loop.warmup(), self._loops))

    def start(self, num_requests: int = 1) -> None:
        """Start the threads, and begin to compile what the first requests need.

        `num_requests` of them arrive together, at all replicas.
        """
        if any(device.platform != "cpu" for device in self.devices):
            sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        share = -(-num_requests // len(self._weights[0].loops))
        for loop in self._loops:
            loop.start(share)

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """Compile a grammar for all replicas. See `EngineLoop.prepare`."""
        await self._loops[0].prepare(grammar, owner)

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        policy: Policy = ALL,
        tenant: str | None = None,
        time_limit: TimeLimit | None = None,
        call: str | None = None,
    ) -> Generation:
        """Queue a request on one replica of the policy's weights. See `EngineLoop.submit`.

        Raises ValueError if there are no such weights.
        """
        if policy.weights >= len(self._weights):
            raise InvalidValue.unknown(
                "policy",
                f"policy {policy.name!r} has weights {policy.weights}; the engine has "
                f"{len(self._weights)}",
            )
        loops, router = self._weights[policy.weights].loops, self._weights[policy.weights].router
        # A failed loop is idle, so without this it would get every request.
        loads = [loop.num_open if loop.status != "failed" else FAILED for loop in loops]
        chosen = loops[router.select(prompt_ids, loads) if len(loads) > 1 else 0]
        return chosen.submit(prompt_ids, sampling, policy.adapter, tenant, time_limit, call)

    def publish(self, params: Params | None, version: int | None = None, weights: int = 0) -> None:
        """Use these weights for new requests, and for running ones from their next token on.

        They replace those with index `weights`. `version` is by default the next one. With
        `params=None` the weights stay the same under a new version. Any thread may call this. It
        blocks until the weights are copied, and meanwhile the replicas go on decoding. See
        `EngineLoop.load_weights`.
        """
        replicas = self._weights[weights]
        version = replicas.loops[-1].version + 1 if version is None else version
        copy = None if params is None else self._programs.prepare_copy(params)
        for loop in replicas.loops:
            loop.load_weights(copy, version)
        if params is not None:
            replicas.router.forget()

    @contextmanager
    def dispatching(self) -> Iterator[None]:
        """Let another thread start programs on devices of the engine.

        Programs with collectives have to start in one order on all their devices. So no replica
        starts one in the meantime.
        """
        with ExitStack() as stack:
            for loop in self._loops:
                stack.enter_context(loop.dispatching)
            yield

    async def drain(self) -> None:
        """Refuse new requests, and return when none is open."""
        await asyncio.gather(*(loop.drain() for loop in self._loops))

    def close(self) -> None:
        """Stop the threads. Unfinished requests fail with EngineError."""
        for loop in self._loops:
            loop.close()

    def stats(self) -> dict[str, float]:
        """Return the counters, summed over all weights and their replicas."""
        first, *others = (weights.stats() for weights in self._weights if weights.are_counted)
        return join_stats([first, *others]) | {
            name: first[name] for name in SHARED if name in first
        }


def make_programs(
    model: DecoderConfig, serve: ServeConfig, *, dtype: str, mesh: Mesh | None = None
) -> list[SlotPrograms]:
    """Return the programs of each replica, which are compiled when they first run.

    The mesh is by default `serve.mesh`, or all devices. Raises ConfigError if the settings do not
    fit the model or the devices.
    """
    mesh = mesh or serving_mesh(serve.mesh, MeshConfig())
    return [SlotPrograms(model, serve, dtype=dtype, mesh=part) for part in split_by_data(mesh)]


def _loop_type(serve: ServeConfig) -> Any:
    if serve.orchestrator == "native":
        return EngineLoop
    names = {"jetstream": "lightning_jax.engine.jetstream.loop:JetStreamLoop"}
    return load_function(names.get(serve.orchestrator, serve.orchestrator))
