"""Tests of sessions that last for many steps: which are trained, and how old their calls are."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.sessions.work_messages import EndFields, OpenFields
from lightning_jax.models.config import MeshConfig, ModelConfig
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.rollouts.collect import read_trajectories
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.loop.startup import open_run
from lightning_jax.train.watch.findings import findings
from lightning_jax.types import Metrics, Rollout, Span

PER_STEP, NUM_STEPS, NUM_CALLS = 8, 20, 5
MAX_STALENESS = 2
ALGORITHM = AlgorithmConfig(
    baseline="batch_mean",
    normalize="batch_std",
    proximal="old",
    correction="truncate",
    max_staleness=MAX_STALENESS,
)


def _config(run_dir: Path, **rollout: Any) -> Config:
    settings: dict[str, Any] = {"tasks_per_step": PER_STEP, "group_size": 1, "concurrency": 1000}
    return Config(
        run_dir=str(run_dir),
        num_steps=NUM_STEPS,
        model=ModelConfig(name="tiny"),
        serve=ServeConfig(slots=4, max_len=64, prefill_buckets=(32,), api_key="owner-key"),
        agent=AgentConfig(external=True),
        rollout=RolloutConfig(**settings | rollout),
        algorithm=ALGORITHM,
        batch=BatchConfig(rows=1, row_len=128, max_targets=64, head_chunk=64),
        mesh=MeshConfig(fsdp=1),
    )


@asynccontextmanager
async def _collector(config: Config) -> AsyncIterator[Any]:
    async with open_run(config, [], []) as run:
        yield run.collector
        await run.collector.groups.close()


def _call(store: Store, rollout_id: str, version: int) -> None:
    """Record a call as the gateway does. Weights of this version sampled its two tokens."""
    number = store.next_sequence()
    span = Span("t", f"{number:016x}", None, "chat", number, number + 1, _attributes(version))
    store.add_span(rollout_id, span)


def _attributes(version: int) -> dict[str, Any]:
    return {
        attributes.POLICY: "policy",
        attributes.PROMPT_TOKEN_IDS: (1,),
        attributes.RESPONSE_TOKEN_IDS: (2, 3),
        attributes.BEHAVIOR_LOGPROBS: (-1.0, -1.0),
        attributes.SAMPLING_LOGPROBS: (-1.0, -1.0),
        attributes.POLICY_VERSIONS: (version, version),
        attributes.RESPONSE_FINISH_REASONS: ("stop",),
    }


async def _begin(groups: Any, step: int, number: int) -> asyncio.Task[list[Any]]:
    """Return a step, once it has begun and has taken groups or waits for more."""
    taking = asyncio.create_task(groups.take(step, number))
    async with asyncio.timeout(20):
        while groups._present.step != step:
            await asyncio.sleep(0)
    await _settle(groups)
    return taking


async def _settle(groups: Any) -> None:
    """Let a waiting step write to the store what it drops, and then what it takes."""
    for _ in range(3):
        await groups._runner.store.in_order(lambda: None)


async def _open(groups: Any, name: str) -> str:
    return (await groups.open(OpenFields(task={"id": name})))[0]


@dataclass
class Traffic:
    """Sessions that ended on a fake clock, and what was trained."""

    lengths: dict[int, float] = field(default_factory=dict)  # by session
    steps: dict[int, int] = field(default_factory=dict)  # number of steps in which it ran
    taken: list[list[int]] = field(default_factory=list)  # sessions by step
    ages: list[int] = field(default_factory=list)  # of trained calls
    rows: list[Metrics] = field(default_factory=list)

    @property
    def slowest(self) -> set[int]:
        """The slowest tenth of the sessions."""
        ranked = sorted(self.lengths, key=lambda session: -self.lengths[session])
        return set(ranked[: len(ranked) // 10])


async def _simulate(run_dir: Path, load: float) -> Traffic:
    """Train while sessions of very uneven length begin. `load` steps are filled in an update.

    The clock's unit is the time of an update. A session makes calls at even distances, the last one
    at its end.
    """
    rng, traffic, began = np.random.default_rng(0), Traffic(), list[tuple[str, int, float]]()
    numbers = itertools.count(1)  # events of one time happen in their order
    events: list[tuple[float, int, str, int]] = [(0.0, 0, "begin", 0)]
    step = 0

    def at(time: float, what: str, session: int = -1) -> None:
        heapq.heappush(events, (time, next(numbers), what, session))

    async with _collector(_config(run_dir)) as collector:
        groups, store = collector.groups, collector.groups._runner.store
        taking = await _begin(groups, step, PER_STEP)
        while len(traffic.taken) < NUM_STEPS:
            now, _, what, session = heapq.heappop(events)
            if what == "begin":
                length = float(rng.lognormal(0.5, 1.0))
                began.append((await _open(groups, str(session)), step, length))
                for number in range(NUM_CALLS):
                    at(now + length * (number + 1) / NUM_CALLS, "call", session)
                at(now + length, "end", session)
                at(now + float(rng.exponential(1 / load / PER_STEP)), "begin", session + 1)
            elif what == "call":
                _call(store, began[session][0], step)
            elif what == "end":
                rollout_id, first, traffic.lengths[session] = began[session]
                traffic.steps[session] = step - first + 1
                await groups.end(rollout_id, EndFields(reward=float(rng.random())))
                await _settle(groups)
            else:  # an update ended
                step += 1
                taking = await _begin(groups, step, PER_STEP)
            if taking.done() and step == len(traffic.taken):
                rollouts = [group.rollouts[0] for group in taking.result()]
                traffic.taken.append([int(rollout.task_id) for rollout in rollouts])
                traffic.rows.append(await _train(collector, rollouts, step, traffic.ages))
                at(now + 1, "updated")
        taking.cancel()
    return traffic


async def _train(collector: Any, rollouts: list[Rollout], step: int, ages: list[int]) -> Metrics:
    """Return the metrics of the step, and add the ages of its trained calls to `ages`."""
    trajectories, metrics = await read_trajectories(
        collector.groups._runner.store, rollouts, policy_version=step, reader=collector.reader
    )
    sequences, of_data = prepare_step(trajectories, ALGORITHM, policy_version=step)
    calls = [call for trajectory in trajectories for call in trajectory.transitions]
    found = [step - call.policy_versions[0] for call in calls]
    fresh = [age for age in found if age <= MAX_STALENESS]
    assert len(sequences) == len(fresh) > 0
    assert of_data["train/dropped_stale"] == len(calls) - len(fresh)
    assert metrics["train/staleness_max"] == max(fresh)
    ages += fresh
    return metrics | of_data | collector.groups.take_metrics()


@pytest.mark.parametrize(
    ("load", "kinds"),
    [(0.5, set()), (1.0, {"stale_calls"}), (2.0, {"stale_calls", "too_old"})],
)
async def test_the_slowest_tenth_is_trained_at_every_load(
    tmp_path: Path, load: float, kinds: set[str]
) -> None:
    traffic = await _simulate(tmp_path, load)
    taken = [session for sessions in traffic.taken for session in sessions]
    assert len(set(taken)) == len(taken) == PER_STEP * NUM_STEPS
    slowest = traffic.slowest
    assert sum(session in slowest for session in taken) / len(taken) > 0.05
    # None of them would be trained if its age counted from its beginning.
    assert fmean(traffic.steps[session] for session in slowest) > MAX_STALENESS + 1
    assert max(traffic.ages) <= MAX_STALENESS and fmean(traffic.ages) < 1.5
    row = {name: fmean(row.get(name, 0.0) for row in traffic.rows) for name in traffic.rows[-1]}
    assert {finding.kind for finding in findings(row)} & {"stale_calls", "too_old"} == kinds


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_a_group_is_dropped_once_all_of_its_calls_are_too_old(
    tmp_path: Path, is_resumed: bool
) -> None:
    """Session a has calls of steps 0 and 3, b of step 0, c has none, and d runs since step 0."""
    config = _config(tmp_path, tasks_per_step=1)
    async with _collector(config) as collector:
        groups, store = collector.groups, collector.groups._runner.store
        (await _begin(groups, 0, 1)).cancel()
        ids = {name: await _open(groups, name) for name in "abcd"}
        for name in "abd":
            _call(store, ids[name], 0)
        await groups.end(ids["b"], EndFields(reward=1.0))
        (await _begin(groups, 3, 2)).cancel()
        counts = groups.take_metrics()
        assert counts["rollout/num_external_groups_too_old"] == 1
        assert counts["rollout/num_external_groups_incomplete"] == 0
        assert counts["rollout/external_too_old_share"] == 1.0
        _call(store, ids["a"], 3)
        for name in "ac":
            await groups.end(ids[name], EndFields(reward=1.0))
        if not is_resumed:
            taken = await groups.take(3, 2)
            assert [group.task["id"] for group in taken] == ["a", "c"]
            await groups.end(ids["d"], EndFields(reward=1.0))  # its only call is too old
            assert groups.num_finished == 0
            counts = groups.take_metrics()
            assert counts["rollout/num_external_groups_too_old"] == 1
            assert counts["rollout/external_too_old_share"] == pytest.approx(1 / 3)
            return
    async with _collector(config) as collector:
        taking = await _begin(collector.groups, 4, 2)
        assert [group.task["id"] for group in taking.result()] == ["a", "c"]
        counts = collector.groups.take_metrics()  # the store knows that b was dropped
        assert counts["rollout/num_external_groups_too_old"] == 1
        assert counts["rollout/num_external_groups_incomplete"] == 1  # d was stopped


async def test_a_group_that_lacks_attempts_is_kept_while_one_runs(tmp_path: Path) -> None:
    async with _collector(_config(tmp_path, tasks_per_step=1, group_size=2)) as collector:
        groups, store = collector.groups, collector.groups._runner.store
        (await _begin(groups, 0, 1)).cancel()
        for name in ("kept", "left"):
            first = await _open(groups, name)
            _call(store, first, 0)
            await groups.end(first, EndFields(reward=0.0))
        second = await _open(groups, "kept")
        taking = await _begin(groups, 5, 1)
        counts = groups.take_metrics()
        assert counts["rollout/num_external_groups_incomplete"] == 1
        assert groups.num_finished == 1
        _call(store, second, 5)
        await groups.end(second, EndFields(reward=1.0))
        (group,) = await taking
        assert (group.version, len(group.rollouts)) == (5, 2)


async def test_counts_of_all_sampling_rounds_are_in_the_metrics(tmp_path: Path) -> None:
    config = _config(tmp_path, tasks_per_step=1, group_size=2)
    config = replace(config, algorithm=replace(ALGORITHM, max_sampling_rounds=2))
    async with _collector(config) as collector:
        groups, store = collector.groups, collector.groups._runner.store
        sampling = asyncio.create_task(collector.sample(0))
        while not groups._is_ready:
            await asyncio.sleep(0.01)
        await groups.end(await _open(groups, "equal"), EndFields(discard=True))
        for name, rewards in (("equal", (1.0, 1.0)), ("unequal", (0.0, 1.0))):
            for reward in rewards:
                rollout_id = await _open(groups, name)
                _call(store, rollout_id, 0)
                await groups.end(rollout_id, EndFields(reward=reward))
        _, metrics = await sampling
        assert metrics["rollout/num_sampling_rounds"] == 2
        assert metrics["rollout/num_external_unfinished"] == 1
