"""Tests of the probes that end a warm-up, and of the weights that the run goes on from."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from coded import raises_coded
from log_events import records
from toy_runs import MODEL, TOY, toy_config

from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.formats.load import save_hf
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.testing.records import sequence
from lightning_jax.traces.store import Store
from lightning_jax.train.config import (
    CheckpointConfig,
    Config,
    EvalConfig,
    WarmupConfig,
    WarmupStopConfig,
)
from lightning_jax.train.loop.startup import load_trainable
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.loop.warmup_probes import Probe, is_past_peak, read_probe
from lightning_jax.train.state.replica import Replica
from lightning_jax.types import Rollout, Task

TASKS: list[Task] = [{"id": f"t{i}", "question": "abcdefgh"[i]} for i in range(8)]


def _rollout(task: str, index: int, reward: float | None, status: str = "scored") -> Rollout:
    return Rollout(
        rollout_id=f"{task}-{index}",
        task_id=task,
        group_id=task,
        phase="probe",
        step=0,
        index=index,
        attempt=1,
        status=status,  # pyright: ignore[reportArgumentType]
        reward=reward,
    )


def test_a_probe_counts_unequal_and_solved_tasks() -> None:
    rewards = {"solved": (1.0, 1.0), "useful": (0.0, 1.0), "near": (0.2, 0.7), "lost": (0.0, 0.0)}
    rollouts = [
        _rollout(task, index, reward)
        for task, values in rewards.items()
        for index, reward in enumerate(values)
    ]
    rollouts.append(_rollout("solved", 2, None, "infrastructure_failure"))  # says nothing
    probe = read_probe(4, rollouts)
    assert probe == Probe(4, 0.5, 0.5)
    assert probe.score == 0.25
    failed = [*rollouts, _rollout("solved", 3, 0.0, "agent_failure")]
    assert read_probe(4, failed).unequal_share == 0.75
    assert read_probe(0, []).score == 0.0


@pytest.mark.parametrize(
    ("scores", "patience", "expected"),
    [
        ([], 1, False),
        ([0, 0, 0], 1, False),  # nothing that RL could use yet
        ([0.04, 0, 0.02], 1, False),  # solved by luck
        ([0, 0.2], 1, False),
        ([0, 0.2, 0.1], 1, True),
        ([0, 0.2, 0.2], 1, False),  # as good after more demonstrations
        ([0, 0.2, 0.1], 2, False),
        ([0, 0.2, 0.1, 0.3], 2, False),
        ([0, 0.2, 0.1, 0.15], 2, True),
    ],
)
def test_a_warmup_ends_past_its_peak(scores: list[float], patience: int, expected: bool) -> None:
    probes = [Probe(step, 1.0, float(score)) for step, score in enumerate(scores)]
    stop = WarmupStopConfig(every=1, patience=patience, min_score=0.1)
    assert is_past_peak(probes, stop) == expected


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_hf(path, MODEL)
    return path


def _config(model_dir: Path, run_dir: Path, **warmup: object) -> Config:
    stop = WarmupStopConfig(every=2, num_tasks=4, attempts=4, patience=1)
    made = WarmupConfig(
        num_steps=30,
        demonstrations=f"{TOY}:demonstrate",
        optimizer=OptimizerConfig(learning_rate=1e-2),
        stop=stop,
    )
    return toy_config(
        model_dir,
        run_dir,
        num_steps=2,
        rollout=RolloutConfig(tasks_per_step=2, group_size=4),
        batch=BatchConfig(rows=8, row_len=64, max_targets=64, head_chunk=64),
        optimizer=OptimizerConfig(),
        eval=EvalConfig(every=0, num_tasks=4, at_start=True),
        checkpoint=CheckpointConfig(every=100),
        mesh=MeshConfig(),
        warmup=replace(made, **warmup),
    )


def test_a_warmup_that_passed_its_peak_ends_early(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The toy policy earns parts of a reward at first, and the full one in every attempt later."""
    config = _config(model_dir, tmp_path / "run")
    with caplog.at_level("INFO"):
        rows = asyncio.run(train(config, TASKS, TASKS))
    scores = {r["step"]: r["warmup/probe_score"] for r in rows if "warmup/probe_score" in r}
    last = next(row for row in rows if "warmup/best_step" in row)
    best = max(reversed(scores), key=lambda step: scores[step])
    assert last["warmup/best_step"] == best == last["step"] - 2
    assert scores[best] >= scores[int(last["step"])]
    (event,) = records(caplog, "warmup_stopped")
    assert (event.step, event.best_step) == (last["step"], best)
    # The policy phase begins where it would after the whole warm-up.
    assert [row["step"] for row in rows] == [*range(int(last["step"]) + 1), 30, 31, 32]
    assert [row["step"] for row in rows if "eval/reward_mean" in row] == [0, 30, 32]
    assert {row["step"] for row in rows if "train/num_rows" in row} == {30, 31}
    assert not (tmp_path / "run" / "warmup_best").exists()
    store = Store(tmp_path / "run" / "store.sqlite")
    probed = store.rollouts(phase="probe")
    store.close()
    assert len(probed) == 4 * 4 * len(scores)
    assert {rollout.task_id for rollout in probed} == {"t0", "t2", "t4", "t6"}


def test_a_stopped_warmup_is_not_repeated_after_a_resume(model_dir: Path, tmp_path: Path) -> None:
    config = _config(model_dir, tmp_path / "run")
    rows = asyncio.run(train(replace(config, num_steps=1), TASKS, TASKS))
    again = asyncio.run(train(config, TASKS, TASKS))
    assert [row["step"] for row in again[:-2]] == [row["step"] for row in rows[:-1]]
    assert again[-1]["step"] == 32


def test_the_best_probes_weights_begin_the_policy_phase(model_dir: Path, tmp_path: Path) -> None:
    config = _config(model_dir, tmp_path)
    replica = Replica(config, load_trainable(config))
    some = [sequence([1, 2], [3, 4], advantage=1.0)]
    replica.update(some)
    replica.advance()
    kept = np.asarray(replica.states[0].params["embed"]["embedding"]).copy()
    replica.keep_weights()
    replica.update(some)
    replica.advance()
    assert np.abs(np.asarray(replica.states[0].params["embed"]["embedding"]) - kept).max() > 0
    replica.end_warmup()
    assert (replica.step, replica.phase) == (30, "policy")
    assert replica.changed == replica.policies  # all are published
    np.testing.assert_array_equal(replica.states[0].params["embed"]["embedding"], kept)
    replica.forget_weights()
    assert not (tmp_path / "warmup_best").exists()
    replica.close()


def test_programs_outside_run_no_probes(model_dir: Path, tmp_path: Path) -> None:
    config = _config(model_dir, tmp_path)
    with raises_coded(InvalidValue, "conflict", "warmup.stop.every"):
        replace(
            config,
            agent=replace(config.agent, external=True),
            algorithm=AlgorithmConfig(proximal="old", correction="truncate"),
        )
