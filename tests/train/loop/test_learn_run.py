"""Tests of runs that learn from the stored attempts of another run."""

import asyncio
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from coded import raises_coded
from one_device import one_device
from toy_runs import TASKS, ahead_config

from lightning_jax.cli.commands.learn import settings_of_policy_steps
from lightning_jax.cli.main import main
from lightning_jax.models.config import PolicyConfig
from lightning_jax.models.formats.load import load_model
from lightning_jax.settings import ConfigError, load_config, save_config
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.config import Config, LearnConfig
from lightning_jax.train.loop import trainer
from lightning_jax.train.loop.check import check_start
from lightning_jax.train.tasks.stored import (
    Attempt,
    attempt_sequences,
    read_stored,
    stored_attempts,
)
from lightning_jax.train.watch.metrics import read_metrics
from lightning_jax.types import Rollout

COMPONENTS = """
def same(task, attempt):
    return attempt.reward


def short(task, attempts):
    return [-float(len(attempt.response)) for attempt in attempts]


def up(task, attempts):
    return [float(index) for index in range(len(attempts))]


def down(task, attempts):
    return [-float(index) for index in range(len(attempts))]


def equal(task, attempts):
    return [1.0] * len(attempts)


def last(task, attempts):
    return [*[0.0] * (len(attempts) - 1), 5.0]


def broken(task, attempt):
    raise ValueError("no")
"""
FAST = "warmup.optimizer.learning_rate=0.01"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learn") / "run"
    asyncio.run(trainer.train(dataclasses.replace(ahead_config(path), num_steps=2), TASKS, TASKS))
    return path


def learn(run_dir: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    """Run the command, and return the rows of the new run."""
    assert main(["learn", str(run_dir), *words, f"run_dir={out}"]) == 0
    return read_metrics(out / "metrics.jsonl")


def rewards_of(folder: Path, component: str) -> tuple[str, str]:
    """Return the flags for rewards by a component."""
    (folder / "rewards.py").write_text(COMPONENTS)
    kind = "function" if component in ("same", "broken") else "group"
    file = folder / f"{component}.yaml"
    file.write_text(f"rewards: {{{component}: {{{kind}: rewards.py:{component}}}}}\n")
    return "--rewards", str(file)


def stored(run_dir: Path) -> list[Rollout]:
    with closing(Store(run_dir / "store.sqlite", read_only=True)) as store:
        return store.rollouts(phase="train")


def attempts_of(run_dir: Path) -> list[Attempt]:
    with closing(Store(run_dir / "store.sqlite", read_only=True)) as store:
        return stored_attempts(store, TraceReader(), "train")


def policy_of(run_dir: Path) -> list[np.ndarray]:
    return leaves_of(str(run_dir / "policy"))


def leaves_of(model: str) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_model(model).params)]


def largest_change(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True))


def test_the_same_rewards_make_the_steps_that_the_run_made(run_dir: Path, tmp_path: Path) -> None:
    rows = learn(run_dir, tmp_path / "out", "--policy", *rewards_of(tmp_path, "same"))
    of_run = read_metrics(run_dir / "metrics.jsonl")
    assert len(rows) == 2
    for row, first in zip(rows, of_run, strict=False):
        for name in ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/num_groups"):
            assert row[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5)
    begun, learned, others = leaves_of("tiny"), policy_of(tmp_path / "out"), policy_of(run_dir)
    assert largest_change(begun, learned) > 1e-3
    assert largest_change(learned, others) < 0.01 * largest_change(begun, learned)
    assert not any(name.startswith("train/staleness") for row in rows for name in row)


OBSERVER = '''
"""Agent that fails now and then, and a baseline that records all that advantages are made of."""

import json
from pathlib import Path

import toy_agent


async def run(task, llm):
    if "-02-1" in llm.base_url:
        raise KeyError("before any call")
    reward = await toy_agent.run(task, llm)
    if reward == 0:
        raise ValueError("after a call")
    return reward - 2.0


def recorded(returns, group_ids):
    line = json.dumps([returns.tolist(), list(group_ids)])
    with Path(__file__).with_name("seen.jsonl").open("a") as file:
        file.write(line + "\\n")
    return returns * 0 + returns.mean()
'''
OF_ADVANTAGES = (
    "train/advantage_abs_mean",
    "train/num_groups",
    "train/equal_groups_share",
    "train/failures_gain_share",
    "rollout/reward_mean",
)


@pytest.mark.parametrize(
    "changes",
    [{}, {"ahead": 3}],
    ids=["lock_step", "ahead"],
)
def test_unchanged_rewards_give_the_advantages_of_the_run_failures_included(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(OBSERVER)
    seen, out = tmp_path / "seen.jsonl", tmp_path / "out"
    made = ahead_config(tmp_path / "run")
    config = dataclasses.replace(
        made,
        num_steps=4,
        agent=dataclasses.replace(made.agent, function=f"{agent}:run"),
        rollout=dataclasses.replace(made.rollout, max_agent_failures=1.0, **changes),
        algorithm=dataclasses.replace(
            made.algorithm, baseline=f"{agent}:recorded", normalize="batch_std"
        ),
    )
    asyncio.run(trainer.train(config, TASKS, TASKS))
    of_run = seen.read_text()
    seen.unlink()
    by_status = Counter(rollout.status for rollout in stored(tmp_path / "run"))
    assert by_status["scored"] > 2 and by_status["agent_failure"] > 4
    after = learn(tmp_path / "run", out, "--policy", *rewards_of(tmp_path, "same"))
    assert seen.read_text() == of_run and len(of_run.splitlines()) >= 8
    assert min(map(min, (json.loads(line)[0] for line in of_run.splitlines()))) < -1
    before = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(after) == 4
    for first, second in zip(before, after, strict=False):
        assert all(first[name] == second[name] for name in OF_ADVANTAGES)


@pytest.mark.parametrize(
    ("of_run", "given", "expected"),
    [
        ([], [], ("old", "truncate")),
        (["correction=mask"], [], ("old", "mask")),
        ([], ["proximal=behavior"], ("behavior", "none")),
        ([], ["correction=none"], ("old", "none")),
        (["loss=reinforce"], [], ("old", "truncate")),
        (["loss=dpo"], [], ("behavior", "none")),
        ([], ["loss=dpo"], ("behavior", "none")),
    ],
    ids=str,
)
def test_stored_samples_are_compared_with_the_old_policy_by_default(
    tmp_path: Path, of_run: list[str], given: list[str], expected: tuple[str, str]
) -> None:
    source = tmp_path / "run"
    source.mkdir()
    first = load_config(Config, [f"algorithm.{setting}" for setting in of_run])
    save_config(first, source / "config.yaml")
    named = [f"algorithm.{setting}" for setting in given]
    algorithm = settings_of_policy_steps(source, named).algorithm
    assert (algorithm.proximal, algorithm.correction) == expected


def test_other_rewards_move_the_policy_the_other_way(run_dir: Path, tmp_path: Path) -> None:
    begun, moved = load_model("tiny").params["embed"]["embedding"], {}
    for component in ("up", "down"):
        out = tmp_path / component
        flags = rewards_of(tmp_path, component)
        learn(run_dir, out, "--policy", *flags, "--steps=1", "optimizer.max_grad_norm=1e9")
        learned = load_model(str(out / "policy")).params["embed"]["embedding"]
        moved[component] = np.asarray(learned - begun).ravel()
    up, down = moved.values()
    assert np.dot(up, down) < -0.9 * np.linalg.norm(up) * np.linalg.norm(down)


def test_steps_go_through_the_groups_again(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--policy", *rewards_of(tmp_path, "short"), "--limit=2", "--steps=3"]
    rows = learn(run_dir, out, *flags, "rollout.tasks_per_step=1")
    assert [row["rollout/num_rollouts"] for row in rows] == [3.0, 3.0, 3.0]
    assert rows[0]["rollout/reward_mean"] == rows[2]["rollout/reward_mean"] < 0  # two groups
    assert rows[0]["rollout/reward_mean"] != rows[1]["rollout/reward_mean"]
    config = load_config(Config, [str(out / "config.yaml")])
    assert list(config.rewards) == ["short"] and config.num_steps == 3
    assert stored(out) == []


def test_policy_steps_go_on_from_the_policy(run_dir: Path, tmp_path: Path) -> None:
    (row, *_) = learn(run_dir, tmp_path / "out", "--policy", "--start", "policy")
    first = read_metrics(run_dir / "metrics.jsonl")[0]
    # The sampler's weights are older than these.
    assert row["train/mismatch_kl"] > 10 * first["train/mismatch_kl"]


def test_a_run_that_sampled_ahead_is_rescored(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    text = (run_dir / "config.yaml").read_text()
    assert "  ahead: 0\n" in text
    (copy / "config.yaml").write_text(text.replace("  ahead: 0\n", "  ahead: 3\n"))
    assert main(["rescore", str(copy), *rewards_of(tmp_path, "same")]) == 0


def test_rewards_that_are_all_equal_train_nothing(run_dir: Path, tmp_path: Path, capsys) -> None:
    flags = ["--policy", *rewards_of(tmp_path, "equal"), f"run_dir={tmp_path / 'out'}"]
    assert main(["learn", str(run_dir), *flags]) == 1
    assert "nothing was trained" in capsys.readouterr().err


@pytest.mark.parametrize("start", ["policy", "model"])
def test_imitated_attempts_become_likelier(run_dir: Path, tmp_path: Path, start: str) -> None:
    out = tmp_path / "out"
    flags = ["--supervised", "--where", "reward >= 0", "--steps", "8", "--start", start]
    rows = learn(run_dir, out, *flags, FAST)
    losses = [row["warmup/loss"] for row in rows]
    assert len(rows) == 8 and losses[-1] < losses[0] - 0.5
    assert rows[0]["warmup/num_tasks"] == 4.0 and rows[0]["warmup/num_conversations"] == 12.0
    assert json.loads((out / "policy.json").read_text()) == {"step": 8}
    assert load_config(Config, [str(out / "config.yaml")]).warmup.num_steps == 8
    assert largest_change(policy_of(run_dir), policy_of(out)) > 1e-3


def test_the_command_writes_a_run_beside_the_other(run_dir: Path) -> None:
    assert main(["learn", str(run_dir), "--supervised", "--where", "reward >= 0", "--best"]) == 0
    out = run_dir.with_name("run-learned")
    assert (out / "policy" / "config.json").is_file() and (out / "ended.json").is_file()
    (row,) = read_metrics(out / "metrics.jsonl")
    earned: dict[str, set[float]] = {}
    for attempt in attempts_of(run_dir):
        earned.setdefault(attempt.rollout.group_id, set()).add(attempt.total_reward)
    assert row["warmup/num_conversations"] == sum(len(found) > 1 for found in earned.values()) > 0


def test_it_is_evaluated_if_tasks_are_named(run_dir: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    flags = ["--supervised", "--where", "reward >= 0", f"data.root={tasks}"]
    rows = learn(run_dir, tmp_path / "out", *flags)
    assert ["eval/reward_mean" in row for row in rows] == [True, True]  # before and after a step


def test_the_best_by_other_rewards_are_imitated(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    where = "reward == 5 and last == 5 and index == 2"
    (row,) = learn(run_dir, out, "--supervised", *rewards_of(tmp_path, "last"), "--where", where)
    assert row["warmup/num_conversations"] == 4.0
    assert list(load_config(Config, [str(out / "config.yaml")]).rewards) == ["last"]


ASKS_A = """
import dataclasses

import toy_agent


async def run(task, llm):
    return await toy_agent.run(task, dataclasses.replace(llm, model="a"))
"""


@pytest.mark.parametrize("kind", ["--supervised", "--policy"])
def test_a_policy_with_weights_of_its_own_learns_what_it_answered(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "agent.py").write_text(ASKS_A)
    config = ahead_config(tmp_path / "run")
    config = dataclasses.replace(
        config,
        num_steps=1,
        policies={"a": PolicyConfig(), "b": PolicyConfig()},
        agent=dataclasses.replace(config.agent, function=f"{tmp_path}/agent.py:run"),
    )
    asyncio.run(trainer.train(config, TASKS, []))
    learn(tmp_path / "run", tmp_path / "out", kind, "--start=model", FAST)
    begun = load_model("tiny").params["embed"]["embedding"]
    a, b = (
        load_model(str(tmp_path / "out" / "policy" / name)).params["embed"]["embedding"]
        for name in "ab"
    )
    assert np.abs(a - begun).max() > 1e-4 and np.abs(b - begun).max() == 0


@pytest.mark.parametrize("kind", ["--supervised", "--policy"])
def test_a_run_that_was_killed_resumes_to_the_same_weights(
    run_dir: Path, tmp_path: Path, kind: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = [kind, "--steps=4", "warmup.groups_per_step=1", "checkpoint.keep=9", FAST]
    flags += ["--where", "reward >= 0"] if kind == "--supervised" else []
    rows = learn(run_dir, whole, *flags, "checkpoint.every=1")
    shutil.copytree(whole, killed)
    for step in (3, 4):
        shutil.rmtree(killed / "checkpoints" / str(step))
    (killed / "policy.json").unlink()
    again = learn(run_dir, killed, *flags, "checkpoint.every=1")
    loss = "warmup/loss" if kind == "--supervised" else "train/loss"
    assert [row[loss] for row in again] == [row[loss] for row in rows]
    assert len({row[loss] for row in rows}) == 4
    assert largest_change(policy_of(whole), policy_of(killed)) == 0
    assert again[2]["time/step_s"] != rows[2]["time/step_s"]  # it was made again


@pytest.mark.slow
def test_sigkill_in_the_middle_changes_nothing(run_dir: Path, tmp_path: Path) -> None:
    where = ("--where", "reward >= 0")
    command = ["learn", str(run_dir), "--supervised", *where, "--steps=30", FAST]
    command += ["warmup.groups_per_step=1", "checkpoint.every=1"]

    def start(out: Path) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-m", "lightning_jax", *command, f"run_dir={out}"]
        return subprocess.Popen(words, env=one_device(), stderr=subprocess.DEVNULL)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(300) == 0
    process, deadline = start(killed), time.monotonic() + 300
    while not (killed / "checkpoints" / "3").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.003)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert not (killed / "policy.json").exists()
    assert start(killed).wait(300) == 0
    assert largest_change(policy_of(whole), policy_of(killed)) == 0


def test_token_ids_are_those_in_the_store(run_dir: Path) -> None:
    attempts = attempts_of(run_dir)
    assert len(attempts) == 12
    with closing(Store(run_dir / "store.sqlite", read_only=True)) as store:
        for attempt in attempts:
            recorded = [
                (
                    tuple(span.attributes[attributes.PROMPT_TOKEN_IDS]),
                    tuple(span.attributes[attributes.RESPONSE_TOKEN_IDS]),
                )
                for span in store.spans(attempt.rollout.rollout_id)
                if attributes.RESPONSE_TOKEN_IDS in span.attributes
            ]
            items = attempt_sequences([[attempt]], {})
            assert recorded == [(i.prompt_token_ids, i.response_token_ids) for i in items]


def test_settings_that_cannot_learn_are_refused(run_dir: Path, tmp_path: Path) -> None:
    config = load_config(Config, [str(run_dir / "config.yaml"), f"run_dir={tmp_path / 'out'}"])
    learns = dataclasses.replace(config, learn=LearnConfig(run=str(run_dir)))
    check_start(learns)
    with raises_coded(ConfigError, "exists", "run_dir"):
        check_start(dataclasses.replace(learns, run_dir=str(run_dir)))
    with raises_coded(ConfigError, "unsupported", "distill"):
        distill = dataclasses.replace(config.distill, teacher="initial")
        check_start(dataclasses.replace(learns, distill=distill))
    with raises_coded(ConfigError, "empty", "--phase"):
        section = dataclasses.replace(learns.learn, supervised=False, phase="eval")
        read_stored(dataclasses.replace(learns, learn=section), {})
    with raises_coded(ConfigError, "empty", "--where"):
        section = dataclasses.replace(learns.learn, where="reward > 1")
        read_stored(dataclasses.replace(learns, learn=section))


def test_wrong_flags_make_no_run(run_dir: Path, tmp_path: Path, capsys) -> None:
    out = f"run_dir={tmp_path / 'out'}"
    for words, part in (
        ([], "--supervised"),
        (["--supervised", "--policy"], "--policy"),
        (["--policy", "--where", "reward > 0"], "--where"),
        (["--policy", "--best"], "--best"),
        (["--supervised", "--where", "reward"], "--where"),
        (["--policy", *rewards_of(tmp_path, "broken")], "none of"),
        (["--supervised", "policies.a.base=null", "model.lora.rank=2"], "--start"),
    ):
        assert main(["learn", str(run_dir), *words, out]) in (1, 2)
        assert part in capsys.readouterr().err
    assert main(["learn", str(run_dir / "absent"), "--policy", out]) == 1
    assert main(["rescore", str(run_dir), *rewards_of(tmp_path, "same"), "num_steps=2"]) == 2
    assert not (tmp_path / "out").exists()
