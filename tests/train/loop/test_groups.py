"""Tests of groups that run ahead of the trainer: which ones a step takes, and resuming."""

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import toy_agent
from coded import raises_coded
from one_device import one_device
from toy_runs import CORRECTED, NUM_STEPS, TASKS, ahead_config, groups_of

from lightning_jax.models.config import MeshConfig
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.prepare import prepare_policies
from lightning_jax.rollouts.collect import read_trajectories
from lightning_jax.rollouts.runner import make_requests, run_requests
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.loop import trainer
from lightning_jax.train.loop.groups import Groups
from lightning_jax.train.loop.startup import open_run
from lightning_jax.train.state.replica import Replica
from lightning_jax.train.tasks.source import oldest_complete
from lightning_jax.train.watch.metrics import read_metrics
from lightning_jax.types import LLM, Rollout, Task


def _ahead(run_dir: Path) -> Config:
    return ahead_config(run_dir, ahead=3)


async def _uneven(task: Task, llm: LLM) -> float:
    """Answer as `toy_agent.run`, after a wait that one task makes much longer than the others."""
    await asyncio.sleep(0.5 if task["id"] == "t1" else 0.01)
    return await toy_agent.run(task, llm)


@pytest.mark.parametrize(
    ("versions", "step", "expected"),
    [
        ("0 (0) 0 0", 0, [0, 2]),  # the oldest that are complete
        ("(0) (0) 0 (0)", 0, None),  # one is not enough
        ("(0) 0 0 0", 1, [1, 2]),  # step 2 can still train the slow one
        ("(0) 0 1 2", 2, None),  # step 2 has to train it
        ("0 (0) 1 2", 1, [0, 2]),
        # Step 2 can train only two of the four that began with version 0.
        ("(0) (0) (0) 0 1 1", 1, None),
        ("(0) 0 (0) 0 1 1", 1, [1, 3]),
    ],
)
async def test_a_step_takes_the_oldest_complete_groups_unless_others_would_become_too_old(
    versions: str, step: int, expected: list[int] | None
) -> None:
    groups = await groups_of(versions)
    chosen = oldest_complete(groups, 2, step=step, per_step=2, max_staleness=2)
    assert (chosen and [group.key[1] for group in chosen]) == expected
    for group in groups:
        group.running[0].cancel()


def test_ahead_without_a_correction_is_refused(tmp_path: Path) -> None:
    config = ahead_config(tmp_path)
    rollout = dataclasses.replace(config.rollout, ahead=8)
    dataclasses.replace(config, rollout=rollout)
    for algorithm, reason, key in (
        (AlgorithmConfig(), "conflict", "algorithm.correction"),
        (dataclasses.replace(CORRECTED, clip_dual=0.0), "conflict", "algorithm.clip_dual"),
        (dataclasses.replace(CORRECTED, max_staleness=3), "out_of_range", "rollout.ahead"),
    ):
        with raises_coded(ValueError, reason, key):
            dataclasses.replace(config, rollout=rollout, algorithm=algorithm)
    dataclasses.replace(config, rollout=rollout, algorithm=AlgorithmConfig(loss="dpo"))


def test_lock_step_is_the_plain_loop_to_the_bit(tmp_path: Path) -> None:
    """Each step runs its own groups, trains on all of them, and publishes before the next."""

    async def by_hand(config: Config) -> list[dict[str, float]]:
        rows = []
        async with open_run(config, TASKS, TASKS) as run:
            source = run.collector.groups
            assert isinstance(source, Groups)
            runner = source.runner
            for step in range(3):
                tasks = run.pipelines.next_tasks(config.rollout.tasks_per_step)
                rollouts = await run_requests(make_requests(tasks, "train", step, 3), runner)
                trajectories, _ = await read_trajectories(run.store, rollouts, policy_version=step)
                sequences, _ = prepare_policies(trajectories, config.algorithm, policy_version=step)
                rows.append(run.leader.call(Replica.update, sequences))
                run._publish(Replica.advance)
        return rows

    whole, plain = ahead_config(tmp_path / "whole"), ahead_config(tmp_path / "plain")
    whole = dataclasses.replace(whole, num_steps=3)
    rows = asyncio.run(trainer.train(whole, TASKS, TASKS))
    expected = asyncio.run(by_hand(plain))
    names = ("train/loss", "train/grad_norm", "train/num_tokens", "train/tokens_forest")
    assert [[row[name] for name in names] for row in rows[:3]] == [
        [row[name] for name in names] for row in expected
    ]
    assert [_tokens(tmp_path / "whole", step) for step in range(3)] == [
        _tokens(tmp_path / "plain", step) for step in range(3)
    ]
    assert {row["train/staleness_max"] for row in rows[:3]} == {0.0}
    assert all(row["time/sampler_wait_s"] > 0 for row in rows[1:3])


def test_groups_run_ahead_within_the_bound_and_are_trained_once(tmp_path: Path) -> None:
    config = _ahead(tmp_path / "run")
    algorithm = dataclasses.replace(CORRECTED, max_staleness=2)
    config = dataclasses.replace(config, algorithm=algorithm)
    rows = asyncio.run(trainer.train(config, TASKS, TASKS, agent=_uneven))
    trained = _trained(tmp_path / "run")
    assert [len(group_ids) for group_ids in trained] == [2] * NUM_STEPS
    counts = Counter(group_id for group_ids in trained for group_id in group_ids)
    assert set(counts.values()) == {1}
    # The ids are those of the first 12 numbers, whichever step trained them.
    assert sorted(counts) == [f"train-{n // 2:05d}-{n % 2:03d}" for n in range(2 * NUM_STEPS)]
    steps = rows[:NUM_STEPS]
    assert [row["rollout/num_rollouts"] for row in steps] == [6.0] * NUM_STEPS
    assert 0 < max(row["train/staleness_max"] for row in steps) <= 2
    assert sum(row.get("train/dropped_stale", 0.0) for row in steps) == 0
    assert all("eval/reward_mean" in rows[step] for step in (0, 2, 4, NUM_STEPS))
    shares = [
        {name: value for name, value in row.items() if name.startswith("train/staleness_share/")}
        for row in steps
    ]
    assert all(sum(found.values()) == pytest.approx(1) for found in shares if found)
    assert any(shares)
    # One weights version answers all of an evaluation, although training rollouts run beside it.
    assert {step: _versions(tmp_path / "run", step) for step in (2, 4)} == {2: {2}, 4: {4}}


@pytest.mark.parametrize(
    ("mesh", "serve"),
    [
        # The same devices, with collectives on both sides.
        pytest.param(MeshConfig(fsdp=2, tensor=2), None, marks=pytest.mark.slow),
        (MeshConfig(fsdp=2), MeshConfig(fsdp=1, tensor=2, first_device=2)),
    ],
)
def test_groups_run_ahead_on_shared_and_on_separate_devices(
    tmp_path: Path, mesh: MeshConfig, serve: MeshConfig | None
) -> None:
    config = dataclasses.replace(_ahead(tmp_path / "run"), num_steps=4, mesh=mesh)
    config = dataclasses.replace(
        config,
        serve=dataclasses.replace(config.serve, mesh=serve),
        batch=dataclasses.replace(config.batch, rows=2),
    )
    rows = asyncio.run(trainer.train(config, TASKS, TASKS, agent=_uneven))
    assert [row["rollout/num_scored"] for row in rows[:4]] == [6.0] * 4
    assert sum(row.get("train/dropped_stale", 0.0) for row in rows[:4]) == 0
    assert all(row["train/num_updates"] == 1 for row in rows[:4])


@pytest.mark.slow
def test_a_setting_that_shapes_rollouts_discards_the_groups_ahead(tmp_path: Path) -> None:
    config = dataclasses.replace(_ahead(tmp_path / "run"), num_steps=2)
    asyncio.run(_stopped_after(2, _ahead(tmp_path / "run")))
    asyncio.run(trainer.train(dataclasses.replace(config, seed=7, num_steps=3), TASKS, TASKS))
    with contextlib.closing(Store(tmp_path / "run" / "store.sqlite")) as store:
        (third,) = [store.step_groups(2)]
        again = [r for group_id in third for r in store.rollouts(group_id=group_id)]
    fresh = [rollout for rollout in again if not rollout.superseded]
    assert len(fresh) == 6 and all(rollout.status == "scored" for rollout in fresh)


async def _stopped_after(num_steps: int, config: Config) -> None:
    running = asyncio.create_task(trainer.train(config, TASKS, TASKS))
    path = Path(config.run_dir) / "metrics.jsonl"
    while not path.exists() or len(read_metrics(path)) < num_steps:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.slow
def test_killed_while_groups_run_ahead_it_samples_nothing_twice(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = _run_in_a_process(run)
    deadline = time.monotonic() + 300
    while not _in_the_middle_of_a_group(run):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.003)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    taken_before, scored_before = _trained(run), _scored(run)
    assert _run_in_a_process(run).wait(600) == 0
    # Steps that had begun to train take the same groups again.
    assert _trained(run)[: len(taken_before)] == taken_before
    counts = Counter(group_id for group_ids in _trained(run) for group_id in group_ids)
    assert set(counts.values()) == {1} and len(counts) == 2 * NUM_STEPS
    scored = _scored(run)
    assert scored_before <= scored and len(scored) == 6 * NUM_STEPS
    assert len({(group_id, index) for group_id, index, _ in scored}) == 6 * NUM_STEPS


def _run_in_a_process(run_dir: Path) -> "subprocess.Popen[bytes]":
    code = (
        "import asyncio, sys; tests = sys.argv[1]; "
        "sys.path[:0] = [tests, tests + '/train', tests + '/train/loop']; "
        "import test_groups as t; from pathlib import Path; "
        "asyncio.run(t.trainer.train(t._ahead(Path(sys.argv[2])), t.TASKS, t.TASKS, "
        "agent=t._uneven))"
    )
    arguments = [sys.executable, "-c", code, str(Path(toy_agent.__file__).parent), str(run_dir)]
    return subprocess.Popen(arguments, env=one_device(), stderr=subprocess.DEVNULL)


def _in_the_middle_of_a_group(run: Path) -> bool:
    """Return True after step 3 if a group has both scored and running rollouts."""
    if not (run / "metrics.jsonl").exists() or len(read_metrics(run / "metrics.jsonl")) < 4:
        return False
    with contextlib.closing(Store(run / "store.sqlite", read_only=True)) as store:
        status: dict[str, set[str]] = {}
        for rollout in store.rollouts(phase="train"):
            status.setdefault(rollout.group_id, set()).add(rollout.status)
    return any({"scored", "running"} <= found for found in status.values())


def _trained(run: Path) -> list[list[str]]:
    with contextlib.closing(Store(run / "store.sqlite", read_only=True)) as store:
        found = [store.step_groups(step) for step in range(NUM_STEPS)]
    return [group_ids for group_ids in found if group_ids]


def _scored(run: Path) -> set[tuple[str, int, int]]:
    with contextlib.closing(Store(run / "store.sqlite", read_only=True)) as store:
        rollouts: list[Rollout] = store.rollouts(phase="train")
    return {(r.group_id, r.index, r.attempt) for r in rollouts if r.status == "scored"}


def _versions(run: Path, step: int) -> set[int]:
    """The weights versions that answered an evaluation."""
    with contextlib.closing(Store(run / "store.sqlite", read_only=True)) as store:
        return {
            version
            for rollout in store.rollouts(phase="eval", step=step)
            for span in store.spans(rollout.rollout_id)
            for version in span.attributes.get(attributes.POLICY_VERSIONS, ())
        }


def _tokens(run: Path, step: int) -> list[tuple[str, tuple[int, ...]]]:
    """The token ids of all responses of a step's rollouts, by rollout."""
    name = attributes.RESPONSE_TOKEN_IDS
    with contextlib.closing(Store(run / "store.sqlite", read_only=True)) as store:
        return [
            (rollout.rollout_id, tuple(span.attributes[name]))
            for rollout in store.rollouts(phase="train", step=step)
            for span in store.spans(rollout.rollout_id)
            if name in span.attributes
        ]
