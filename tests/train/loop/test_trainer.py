"""Tests of the whole loop on a toy task: it learns, resumes, and counts dropped data."""

import asyncio
import contextlib
import dataclasses
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import toy_agent
from coded import raises_coded
from list_sink import ListSink
from log_events import events, records
from one_device import one_device
from toy_runs import MODEL, TASKS, TOY, toy_config

import lightning_jax as lj
from lightning_jax.cli.verify import verify
from lightning_jax.engine.config import ServeConfig
from lightning_jax.models import precision
from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.rl.config import AlgorithmConfig, OptimizerConfig
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.records import sequence
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store, StoreError
from lightning_jax.train.config import (
    CheckpointConfig,
    Config,
    EvalConfig,
    MetricsConfig,
    WarmupConfig,
)
from lightning_jax.train.loop import groups, startup, trainer
from lightning_jax.train.loop.run import Run
from lightning_jax.train.loop.startup import load_trainable, open_run
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.sinks.feeds import SINKS
from lightning_jax.train.state.checkpoint import Checkpointer, CheckpointError
from lightning_jax.train.state.replica import Replica
from lightning_jax.train.watch import metrics
from lightning_jax.train.watch.curves import describe, plot_curves
from lightning_jax.train.watch.metrics import read_metrics
from lightning_jax.train.watch.watches import FiniteWatch, NotFinite
from lightning_jax.types import Task


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_hf(path, MODEL)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16 weights", "copies of the engine"])
def test_it_learns_in_other_ways(kind: str, model_dir: Path, tmp_path: Path) -> None:
    config = toy_config(
        model_dir, tmp_path / "run", num_steps=8, optimizer=OptimizerConfig(learning_rate=5e-2)
    )
    if kind == "bfloat16 weights":  # beside float32 activations
        model = ModelConfig(str(model_dir), dtype="bfloat16", activation_dtype="float32")
        config = dataclasses.replace(config, model=model)
    else:
        serve = ServeConfig(
            slots=4, max_len=64, prefill_buckets=(32,), mesh=MeshConfig(data=3, fsdp=1)
        )
        config = dataclasses.replace(config, serve=serve)
    rows = asyncio.run(train(config, TASKS, TASKS))
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    assert rewards[0] < 0.3 and rewards[-1] > 0.5
    assert max(row.get("train/mismatch_kl", 0.0) for row in rows) < 1e-4
    report = verify(tmp_path / "run", tolerance=0.05 if config.model.dtype == "bfloat16" else None)
    assert any(version.comparisons for version in report.versions) and not report.off


def test_steps_train_on_rollouts_of_local_workers(model_dir: Path, tmp_path: Path) -> None:
    agent = tmp_path / "own_agent.py"
    agent.write_text(
        f"import os, sys\nsys.path.insert(0, {str(TOY.parent)!r})\nimport toy_agent\n\n"
        "async def run(task, llm):\n"
        "    return {'reward': await toy_agent.run(task, llm), 'pid': os.getpid()}\n"
    )
    config = toy_config(
        model_dir, tmp_path / "run", num_steps=2, agent=AgentConfig(f"{agent}:run", workers=2)
    )
    rows = asyncio.run(train(config, TASKS, TASKS))
    assert [row["rollout/num_scored"] for row in rows[:2]] == [32.0, 32.0]
    assert all(row["train/mismatch_kl"] < 1e-5 and row["train/grad_norm"] > 0 for row in rows[:2])
    with contextlib.closing(Store(tmp_path / "run/store.sqlite", read_only=True)) as store:
        pids = {rollout.metrics["pid"] for rollout in store.rollouts(phase="train")}
    assert len(pids) == 2 and os.getpid() not in pids


@pytest.mark.parametrize(("rank", "dtype"), [(0, "float32"), (2, "bfloat16")])
def test_weights_that_train_are_loaded_in_float32(
    rank: int, dtype: str, model_dir: Path, tmp_path: Path
) -> None:
    named = ModelConfig(str(model_dir), dtype="bfloat16", lora=LoraConfig(rank=rank))
    loaded = load_trainable(toy_config(model_dir, tmp_path, model=named))
    assert loaded.params["embed"]["embedding"].dtype == dtype


def test_a_run_keeps_the_dtype_that_auto_was_when_it_began(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = toy_config(
        model_dir, tmp_path / "run", num_steps=0, model=ModelConfig(str(model_dir), dtype="auto")
    )
    for seconds in ((2.0, 1.0), (1.0, 2.0)):  # seconds of float32, of bfloat16
        monkeypatch.setattr(precision, "_seconds", Mock(return_value=seconds))
        asyncio.run(train(auto, TASKS, TASKS))
        saved = load_config(Config, [str(tmp_path / "run/config.yaml")]).model
        assert (saved.dtype, saved.activation_dtype) == ("bfloat16", "float32")


def test_a_toy_task_is_learned_in_eight_steps(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks: list[ListSink] = []
    monkeypatch.setitem(SINKS, "wandb", lambda run: sinks.append(ListSink(run)) or sinks[-1])
    monkeypatch.setattr("lightning_jax.train.sinks.feeds.is_installed", Mock())
    optimizer, kept = OptimizerConfig(learning_rate=5e-2), MetricsConfig(sinks=["wandb"])
    config = toy_config(model_dir, tmp_path / "run", num_steps=8, optimizer=optimizer, metrics=kept)
    rows = asyncio.run(train(config, TASKS, TASKS))
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    assert rewards[0] < 0.3 and rewards[-1] > 0.8
    assert rows[-1]["eval/reward_mean"] > 0.8
    # Sampler and trainer share one forward function, so their log-probabilities agree.
    assert max(row.get("train/mismatch_kl", 0.0) for row in rows) < 1e-5
    _check_run_directory(tmp_path / "run", config)
    (sink,) = sinks
    assert sink.rows == rows and sink.run.name == "run"
    assert sink.end is not None and sink.end[1] == "finished"


def test_a_run_takes_a_function_and_tasks_without_ids(model_dir: Path, tmp_path: Path) -> None:
    asked: list[Any] = []

    async def agent(task: Task, llm: Any) -> float:
        asked.append(task["id"])
        return await toy_agent.run(task, llm)

    config = toy_config(
        model_dir,
        tmp_path / "run",
        num_steps=1,
        agent=AgentConfig("no_such_file.py:run"),
        rollout=RolloutConfig(tasks_per_step=2, group_size=2),
    )
    tasks = [{"question": "a"}, {"question": "b"}]
    (row,) = asyncio.run(lj.train(config, tasks, [], agent=agent))
    assert row["rollout/num_scored"] == 4.0 and sorted(asked) == ["0", "0", "1", "1"]
    with raises_coded(ConfigError, "not_callable", "agent"):
        asyncio.run(lj.train(config, tasks, [], agent="mine.py:run"))  # type: ignore[arg-type]


@pytest.mark.slow
def test_dpo_learns_it_from_pairs(model_dir: Path, tmp_path: Path) -> None:
    config = toy_config(
        model_dir,
        tmp_path / "run",
        num_steps=5,
        algorithm=AlgorithmConfig(loss="dpo", dpo_beta=0.2),
        optimizer=OptimizerConfig(learning_rate=3e-2),
    )
    asyncio.run(train(config, TASKS, []))
    rows = asyncio.run(train(dataclasses.replace(config, num_steps=10), TASKS, TASKS))
    assert rows[-1]["eval/reward_mean"] > 0.8
    steps = [row for row in rows if "train/num_pairs" in row]
    assert len(steps) == 10 and steps[0]["train/num_pairs"] > 1.0
    # At first the policy equals its reference.
    assert steps[0]["train/loss"] == pytest.approx(math.log(2.0), abs=1e-6)
    # A new reference at the sixth step would give ln 2 again.
    assert steps[5]["train/loss"] < 0.6 and steps[5]["train/preference_accuracy"] > 0.5
    assert max(row["train/mismatch_kl"] for row in steps) < 1e-5


def test_a_learned_value_goes_on_where_it_was(model_dir: Path, tmp_path: Path) -> None:
    config = toy_config(
        model_dir,
        tmp_path / "run",
        num_steps=1,
        algorithm=AlgorithmConfig(credit="learned", value_learning_rate=0.1),
        rollout=RolloutConfig(tasks_per_step=2, group_size=4),
    )
    asyncio.run(train(config, TASKS, []))
    (first, second) = asyncio.run(train(dataclasses.replace(config, num_steps=2), TASKS, []))
    assert first["train/value_mean"] == 0.0 and first["train/value_loss"] > 0.0
    assert second["train/value_mean"] != 0.0  # the head was restored from the checkpoint
    assert first["time/values_s"] > 0.0 and first["train/calls_without_value"] == 0.0


def test_a_checkpoint_is_written_beside_the_next_rollouts(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1's save starts after step 2's rollouts do, and the third step's save fails."""
    config = toy_config(
        model_dir,
        tmp_path / "run",
        num_steps=4,
        rollout=RolloutConfig(tasks_per_step=1, group_size=2),
        checkpoint=CheckpointConfig(every=1),
    )
    sampling, make_requests, save = threading.Event(), groups.make_requests, Checkpointer.save

    def seen(tasks: Any, phase: str, step: int, *rest: Any, **more: Any) -> Any:
        if step == 1:
            sampling.set()
        return make_requests(tasks, phase, step, *rest, **more)

    def late(self: Checkpointer, step: int, *rest: Any) -> None:
        assert sampling.wait(60), "no rollout began while the checkpoint was to be written"
        if step == 3:
            raise CheckpointError("the disk is full.")
        save(self, step, *rest)

    monkeypatch.setattr(groups, "make_requests", seen)
    monkeypatch.setattr(Checkpointer, "save", late)
    with pytest.raises(CheckpointError, match="the disk is full"):
        asyncio.run(train(config, TASKS, []))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "time/checkpoint_s" not in rows[0]
    assert all(row["time/checkpoint_s"] >= row["time/checkpoint_wait_s"] for row in rows[1:])


def _check_run_directory(run: Path, config: Config) -> None:
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(9))
    names = {name for row in rows for name in row if name != "step"}
    assert {name for name in names if describe(name) is None} == set()
    trained = load_model(str(run / "policy"))
    before = load_model(config.model.name)
    embedding = trained.params["embed"]["embedding"]
    assert not np.allclose(embedding, before.params["embed"]["embedding"])
    store = Store(run / "store.sqlite")
    assert [r.status for r in store.rollouts(phase="train")] == ["scored"] * 8 * 32
    _, span = store.spans(store.rollouts(step=7)[0].rollout_id)
    assert set(span.attributes["lightning.policy_versions"]) == {7}
    store.close()


def test_tasks_without_a_demonstration_are_counted(model_dir: Path, tmp_path: Path) -> None:
    warmup = WarmupConfig(num_steps=1, group_size=4, demonstrations=f"{TOY}:demonstrate_some")
    config = toy_config(model_dir, tmp_path / "run", num_steps=0, warmup=warmup)
    row = asyncio.run(train(config, TASKS, TASKS))[0]
    number = 4 * warmup.groups_per_step
    assert (row["warmup/num_tasks"], row["warmup/num_conversations"]) == (number, number / 2)
    assert row["warmup/num_sequences"] == number / 2


def test_the_warmup_learns_the_demonstrations_first(model_dir: Path, tmp_path: Path) -> None:
    config = toy_config(
        model_dir,
        tmp_path / "run",
        num_steps=2,
        warmup=WarmupConfig(
            num_steps=10,
            demonstrations=f"{TOY}:demonstrate",
            optimizer=OptimizerConfig(learning_rate=1e-2),
        ),
        rollout=RolloutConfig(tasks_per_step=2, group_size=4),
        eval=EvalConfig(every=0, num_tasks=4, at_start=True, attempts=3),
    )
    rows = asyncio.run(train(config, TASKS, TASKS))
    assert rows[0]["warmup/loss"] > 3 * rows[9]["warmup/loss"]
    evals = {row["step"]: row["eval/reward_mean"] for row in rows if "eval/reward_mean" in row}
    assert evals[0] < 0.5 < evals[10]
    assert sorted(evals) == [0, 10, 12]
    # The change made by the warm-up, then the change after it.
    assert "eval/change_mean" not in rows[0]
    for row, since in ((rows[10], 0), (rows[12], 10)):
        assert row["eval/change_since_step"] == since
        change = evals[int(row["step"])] - evals[since]
        assert row["eval/change_mean"] == pytest.approx(change, abs=1e-12)
    for row in (rows[0], rows[10], rows[12]):
        assert row["eval/sampled_attempts"] == 3
    assert "eval/sampled_change_mean" not in rows[0]
    change = rows[10]["eval/sampled_reward_mean"] - rows[0]["eval/sampled_reward_mean"]
    assert rows[10]["eval/sampled_change_mean"] == pytest.approx(change, abs=1e-12)
    assert rows[0]["eval/sampled_reward_mean"] < rows[10]["eval/sampled_reward_mean"]


def _short(model_dir: Path, run_dir: Path) -> Config:
    return toy_config(
        model_dir,
        run_dir,
        num_steps=5,
        serve=ServeConfig(slots=4, max_len=64, prefill_buckets=(32,)),
        checkpoint=CheckpointConfig(every=2),
    )


def _run_in_a_process(run_dir: Path, model_dir: Path) -> "subprocess.Popen[bytes]":
    code = (
        "import asyncio, sys; tests = sys.argv[1]; "
        "sys.path[:0] = [tests, tests + '/train', tests + '/train/loop']; "
        "import test_trainer as t; "
        "from pathlib import Path; config = t._short(Path(sys.argv[2]), Path(sys.argv[3])); "
        "t.metrics.plot_curves = lambda *_: None; "
        "asyncio.run(t.train(config, t.TASKS, t.TASKS))"
    )
    arguments = [sys.executable, "-c", code, str(TOY.parent), str(model_dir), str(run_dir)]
    return subprocess.Popen(arguments, env=one_device(), stderr=subprocess.DEVNULL)


def test_killed_at_any_moment_it_resumes_on_the_same_curve(model_dir: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    asyncio.run(train(_short(model_dir, whole), TASKS, TASKS))
    for moment in (_during_rollouts, _during_a_save):
        process = _run_in_a_process(broken, model_dir)
        deadline = time.monotonic() + 300
        while not moment(broken):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.003)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert _run_in_a_process(broken, model_dir).wait(600) == 0
    rows = [read_metrics(run / "metrics.jsonl") for run in (whole, broken)]
    assert len(rows[0]) == len(rows[1]) == 6
    # Step 1 is the first after a kill. Its seeds are the same, and so are its tokens. Later steps
    # may differ by rounding, because their requests met others in the batch.
    samples = [_sampled(run, step=1) for run in (whole, broken)]
    assert samples[0] == samples[1] and len(samples[0]) == 32
    store = Store(broken / "store.sqlite")
    again = [r for r in store.rollouts(phase="train") if r.status == "scored" and r.attempt > 1]
    sampled_twice = [r for r in again if r.step not in _interrupted_steps(store)]
    store.close()
    assert sampled_twice == []


def _sampled(run: Path, *, step: int) -> dict[tuple[str, int], list[tuple[int, ...]]]:
    """The token ids of all responses of a step's scored rollouts, by group and place in it."""
    name = attributes.RESPONSE_TOKEN_IDS
    with contextlib.closing(Store(run / "store.sqlite")) as store:
        return {
            (rollout.group_id, rollout.index): [
                tuple(span.attributes[name])
                for span in store.spans(rollout.rollout_id)
                if name in span.attributes
            ]
            for rollout in store.rollouts(phase="train", step=step)
            if rollout.status == "scored"
        }


def _during_rollouts(run: Path) -> bool:
    """Return True if only some rollouts of step 1 have ended, and there is no checkpoint yet."""
    if not (run / "store.sqlite").exists():
        return False
    with (
        contextlib.closing(sqlite3.connect(run / "store.sqlite")) as store,
        contextlib.suppress(sqlite3.OperationalError),  # the table does not exist yet
    ):
        rows = store.execute("SELECT status FROM rollouts WHERE step = 1").fetchall()
        return {("scored",), ("running",)} <= set(rows)
    return False


def _during_a_save(run: Path) -> bool:
    """Return True while Orbax is writing a checkpoint under its temporary name.

    The last complete checkpoint does not include the newest step.
    """
    if len(read_metrics(run / "metrics.jsonl")) < 4:
        return False
    return any("tmp" in path.name for path in (run / "checkpoints").glob("*"))


def _interrupted_steps(store: Store) -> set[int]:
    """Return the steps in which a rollout was running when its process died."""
    return {r.step for r in store.rollouts(phase="train") if r.reason == "crash"}


def test_rollouts_of_other_settings_never_come_back(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 was sampled at another temperature. Two starts later it is sampled again."""
    cold, warm = (RolloutConfig(tasks_per_step=1, group_size=4, temperature=t) for t in (0.5, 1.0))
    config = toy_config(model_dir, tmp_path / "run", num_steps=3, rollout=cold)
    learn, ends = Run._learn, [2, 1]

    async def breaks(run: Run, sequences: Any) -> Any:
        if run.step == ends[0]:
            del ends[0]
            raise RuntimeError("the machine is gone")
        return await learn(run, sequences)

    monkeypatch.setattr(Run, "_learn", breaks)
    for rollout in (cold, warm):
        with pytest.raises(RuntimeError, match="the machine is gone"):
            asyncio.run(train(dataclasses.replace(config, rollout=rollout), TASKS, []))
    monkeypatch.undo()
    rows = asyncio.run(train(dataclasses.replace(config, rollout=warm), TASKS, []))
    assert max(row["train/mismatch_kl"] for row in rows) < 1e-5
    with contextlib.closing(Store(tmp_path / "run/store.sqlite")) as store:
        taken = {s: [r.attempt for r in store.rollouts(step=s)] for s in range(3)}
    # The rollouts of step 1 are reused from the second start, so there is no third attempt.
    assert taken == {step: [1, 2] * 4 for step in range(3)}


def test_a_change_of_what_learns_keeps_the_rollouts_of_the_present_weights(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rollout = RolloutConfig(tasks_per_step=1, group_size=4)
    config = toy_config(model_dir, tmp_path / "run", num_steps=1, rollout=rollout)
    monkeypatch.setattr(Run, "_learn", Mock(side_effect=RuntimeError("the machine is gone")))
    with pytest.raises(RuntimeError, match="the machine is gone"):
        asyncio.run(train(config, TASKS, []))
    monkeypatch.undo()
    slower = OptimizerConfig(learning_rate=1e-3)
    asyncio.run(train(dataclasses.replace(config, optimizer=slower), TASKS, []))
    with contextlib.closing(Store(tmp_path / "run/store.sqlite")) as store:
        assert {r.attempt for r in store.rollouts(step=0)} == {1}
    (record,) = records(caplog, "settings_changed")
    assert record.changed == ["optimizer.learning_rate"]


def test_one_process_at_a_time_works_in_a_run_directory(model_dir: Path, tmp_path: Path) -> None:
    config = toy_config(model_dir, tmp_path / "run", num_steps=0)

    async def twice() -> None:
        async with open_run(config, TASKS, []):
            with raises_coded(ConfigError, "locked", "run_dir"):
                await train(config, TASKS, [])

    asyncio.run(twice())
    asyncio.run(train(config, TASKS, []))  # the lock is free again


def test_more_agents_than_open_files_allow_are_refused_at_the_start(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "number_free", lambda: 3 * trainer.FILES_PER_AGENT + 1)
    config = toy_config(model_dir, tmp_path / "run", num_steps=0)
    with raises_coded(ConfigError, "conflict", "rollout.concurrency") as caught:
        asyncio.run(train(config, TASKS, []))
    assert "rollout.concurrency=3" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_run_directory_is_private_and_a_run_with_a_key_goes_on(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve = dataclasses.replace(toy_config(model_dir, tmp_path).serve, api_key="secret-1")
    run = tmp_path / "run"
    asyncio.run(train(toy_config(model_dir, run, num_steps=1, serve=serve), TASKS, []))
    assert run.stat().st_mode & 0o077 == 0
    private = ("config.yaml", "sources.json", "store.sqlite", "metrics.jsonl", "checkpoints")
    assert all((run / name).stat().st_mode & 0o077 == 0 for name in private)
    texts = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not any(b"secret-1" in text for text in texts)
    other = dataclasses.replace(serve, api_key="secret-2")
    rows = asyncio.run(train(toy_config(model_dir, run, num_steps=2, serve=other), TASKS, []))
    assert [row["step"] for row in rows if "rollout/reward_mean" in row] == [0, 1]
    assert "settings_changed" not in events(caplog)
    assert "secret" not in caplog.text


def test_a_run_made_longer_or_shorter_loses_no_evaluation(model_dir: Path, tmp_path: Path) -> None:
    rollout = RolloutConfig(tasks_per_step=1, group_size=4)
    config = toy_config(model_dir, tmp_path / "run", rollout=rollout)
    for number, steps in ((1, [1]), (2, [1, 2]), (1, [1, 2])):
        asyncio.run(train(dataclasses.replace(config, num_steps=number), TASKS, TASKS))
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows if "eval/reward_mean" in row] == steps


def test_jetstream_evaluates_but_cannot_train(model_dir: Path, tmp_path: Path) -> None:
    config = toy_config(model_dir, tmp_path / "run")
    serve = dataclasses.replace(config.serve, orchestrator="jetstream")
    with raises_coded(ConfigError, "conflict", "serve.orchestrator"):
        asyncio.run(train(dataclasses.replace(config, serve=serve), TASKS, TASKS))
    rewards = {}
    for name in ("native", "jetstream"):
        serve = dataclasses.replace(config.serve, orchestrator=name)
        only_eval = dataclasses.replace(
            config, serve=serve, num_steps=0, run_dir=str(tmp_path / name)
        )
        (row,) = asyncio.run(train(only_eval, TASKS, TASKS))
        rewards[name] = row["eval/reward_mean"]
    assert rewards["native"] == rewards["jetstream"]  # greedy: the same tokens


def test_a_run_that_fails_while_it_opens_closes_its_store(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Path] = []

    class Watched(Store):
        def close(self) -> None:
            closed.append(self.path)
            super().close()

    monkeypatch.setattr(startup, "Store", Watched)
    config = toy_config(
        model_dir, tmp_path / "run", warmup=WarmupConfig(demonstrations=f"{TOY}:no")
    )
    with raises_coded(ConfigError, "no_such_function", "no"):
        asyncio.run(train(config, TASKS, TASKS))
    assert closed == [tmp_path / "run" / "store.sqlite"]


def test_no_equal_group_moves_the_weights(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "plot_curves", plot_curves)
    agent = AgentConfig(f"{TOY}:two_turns")
    rollout = RolloutConfig(tasks_per_step=2, group_size=2)
    config = toy_config(model_dir, tmp_path / "run", agent=agent, rollout=rollout, num_steps=1)
    (row, _) = asyncio.run(train(config, TASKS, TASKS))
    assert row["train/equal_groups_share"] == 1 and row["train/skipped_updates"] == 1
    assert row["train/dropped_zero_advantage"] == 8  # 2 tasks, 2 rollouts, 2 calls
    assert row["serve/prefix_breaks"] == row["serve/malformed_tool_calls"] == 0
    assert row["serve/joined_calls"] == 0
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    num_params = sum(leaf.size for leaf in jax.tree.leaves(MODEL.params))
    published = 4 * num_params / row["time/publish_s"] / 1e9
    assert row["serve/publish_gb_per_s"] == pytest.approx(published)
    trained = load_model(str(tmp_path / "run" / "policy"))
    before = load_model(str(model_dir))
    np.testing.assert_array_equal(
        trained.params["embed"]["embedding"], before.params["embed"]["embedding"]
    )


def test_groups_with_equal_returns_are_replaced(model_dir: Path, tmp_path: Path) -> None:
    """Rewards are multiples of 1/4, so some pairs of rollouts are equal and some are not."""
    config = toy_config(
        model_dir,
        tmp_path / "run",
        rollout=RolloutConfig(tasks_per_step=3, group_size=2),
        algorithm=AlgorithmConfig(max_sampling_rounds=3),
        num_steps=2,
    )
    (*rows, _) = asyncio.run(train(config, TASKS, TASKS))
    for row in rows:
        replaced, left_out = (row[f"rollout/num_groups_{k}"] for k in ("replaced", "left_out"))
        assert row["rollout/num_rollouts"] == 2 * (3 + replaced)
        assert row["train/num_groups"] == 3 + replaced - left_out
        assert row["train/equal_groups_share"] == 0
        assert replaced == left_out or row["rollout/num_sampling_rounds"] == 3
    replaced = sum(int(row["rollout/num_groups_replaced"]) for row in rows)
    assert replaced > 0
    # No task is skipped: unused tasks are kept in the checkpoint for the next step.
    replica = Replica(config, load_model(str(model_dir)))
    assert replica.step == 2 and replica.progress is not None
    assert len(replica.progress["spare_tasks"]) == -replaced % 3
    replica.close()


def test_steps_without_a_finite_gradient_stop_the_run(tmp_path: Path, model_dir: Path) -> None:
    replica = Replica(toy_config(model_dir, tmp_path), load_model(str(model_dir)))
    watch = FiniteWatch(replica.policies, limit=2)
    good = [sequence([1], [2, 3])]
    bad = [sequence([1], [2, 3], weight=1e36)]  # the squared gradient norm overflows
    for sequences in (bad, good, [], bad):  # not in a row, because of the good step
        row = replica.update(sequences)
        watch.after_update(0, row)
    assert row["train/skipped_updates"] == row["train/num_updates"] == 1
    empty = replica.update([])
    assert empty["train/num_updates"] == 0
    watch.after_update(0, empty)  # does not count
    with raises_coded(NotFinite, "not_finite"):
        watch.after_update(0, replica.update(bad))
    replica.close()


def test_samples_of_another_distribution_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    trainer._warn_of_bias(RolloutConfig())
    assert caplog.messages == []
    trainer._warn_of_bias(RolloutConfig(temperature=0.6))
    assert caplog.messages == []  # gradients are taken at that temperature
    trainer._warn_of_bias(RolloutConfig(temperature=0.0, top_k=5))
    (record,) = records(caplog, "biased_sampling")
    assert record.settings == ["rollout.temperature", "rollout.top_k"]


@pytest.mark.parametrize("name", ["run/store.sqlite", "run"])
def test_a_run_whose_store_is_deleted_ends_with_that_error(
    name: str, model_dir: Path, tmp_path: Path
) -> None:
    rollout = RolloutConfig(tasks_per_step=1, group_size=4)
    config = toy_config(model_dir, tmp_path / "run", rollout=rollout)

    def agent(task: Task, llm: lj.LLM) -> float:
        path = tmp_path / name
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return 1.0

    with raises_coded(StoreError, "deleted", str(tmp_path / "run/store.sqlite")):
        asyncio.run(train(config, TASKS, [], agent=agent))


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, kept = tmp_path / "run", CheckpointConfig(every=1, keep=2)
    rollout = RolloutConfig(tasks_per_step=1, group_size=4)
    config = toy_config(model_dir, run, num_steps=3, rollout=rollout, checkpoint=kept)
    before = asyncio.run(train(config, TASKS, []))
    weights = run / "checkpoints" / "3" / "state"
    block = max(weights.rglob("d/*"), key=lambda path: path.stat().st_size)
    block.write_bytes(block.read_bytes()[:-1] + b"\0")
    again = asyncio.run(train(dataclasses.replace(config, num_steps=4), TASKS, []))
    (warning,) = records(caplog, "checkpoint_damaged")
    assert warning.steps == [3] and (run / "checkpoints_damaged" / "3").is_dir()
    assert [row["step"] for row in again] == [0, 1, 2, 3]
    assert again[2]["train/loss"] == before[2]["train/loss"]  # with the stored rollouts
    with contextlib.closing(Store(run / "store.sqlite")) as store:
        assert {r.attempt for r in store.rollouts()} == {1}
        assert len(store.rollouts()) == 16
