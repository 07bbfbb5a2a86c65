"""Tests of supervised steps on the stored attempts of a run."""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from coded import raises_coded
from test_groups import TASKS, _config

from lightning_jax.cli.main import main
from lightning_jax.models.formats.load import load_model
from lightning_jax.rollouts.conditions import parse_condition
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train import trainer
from lightning_jax.train.attempts import (
    Attempt,
    attempt_sequences,
    choose_attempts,
    stored_attempts,
)
from lightning_jax.train.config import Config
from lightning_jax.train.metrics import read_metrics
from lightning_jax.train.sft import Choice, learn_from_attempts
from lightning_jax.types import Rollout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sft") / "run"
    config = dataclasses.replace(_config(path), num_steps=2)
    asyncio.run(trainer.train(config, TASKS, TASKS))
    return path


def settings(run_dir: Path, out: Path, *changes: str) -> Config:
    return load_config(Config, [str(run_dir / "config.yaml"), f"run_dir={out}", *changes])


def attempts_of(run_dir: Path) -> list[Attempt]:
    store = Store(run_dir / "store.sqlite", read_only=True)
    try:
        return stored_attempts(store, TraceReader(), "train")
    finally:
        store.close()


def made(reward: float, *, group: str = "g", index: int = 0, **metrics: float) -> Attempt:
    name = f"{group}-{index}"
    rollout = Rollout(name, "t", group, "train", 0, index, 1, "scored", reward, metrics=metrics)
    return Attempt(
        rollout, trajectory(transition([1], [2, 3]), reward=reward, group=group, rollout=name)
    )


def test_the_best_of_each_group_or_all_that_the_condition_takes():
    attempts = [
        made(0.2, index=0),
        made(0.9, index=1),
        made(0.9, index=2, exact=1.0),
        made(0.1, group="h"),
        made(0.5, group="i", exact=0.0),
        made(1.0, group="j", exact=0.0),
    ]

    def chosen(text: str, *, only_best: bool = False) -> list[list[str]]:
        groups = choose_attempts(attempts, parse_condition(text), only_best=only_best)
        return [[attempt.rollout.rollout_id for attempt in group] for group in groups]

    assert chosen("reward > 0.1") == [["g-0", "g-1", "g-2"], ["i-0"], ["j-0"]]
    # A lone attempt is above no mean, so only the one with the full reward is left.
    assert chosen("reward > 0.1", only_best=True) == [["g-1"], ["j-0"]]
    # 0.2 is the best that the condition takes, and below the mean of its group.
    assert chosen("index == 0", only_best=True) == [["j-0"]]
    assert chosen("exact == 1 or tokens > 2") == [["g-2"]]
    with raises_coded(ConfigError, "empty", "--where"):
        chosen("reward > 1")
    with raises_coded(ConfigError, "empty", "--best"):
        chosen("reward < 0.2", only_best=True)
    with raises_coded(ConfigError, "unknown", "rewrad"):
        chosen("rewrad > 1")


def test_failed_attempts_count_in_the_mean_of_their_group_and_teach_nothing():
    failed = made(0.1, index=2)
    failed = Attempt(failed.rollout, dataclasses.replace(failed.trajectory, is_failed=True))
    silent = made(0.9, index=3)
    silent = Attempt(silent.rollout, dataclasses.replace(silent.trajectory, transitions=()))
    everything = parse_condition("reward >= -1")

    def best(*attempts: Attempt) -> list[int]:
        groups = choose_attempts(attempts, everything, only_best=True)
        return [attempt.rollout.index for group in groups for attempt in group]

    alike = [made(0.2, index=0), made(0.2, index=1)]
    with raises_coded(ConfigError, "empty", "--best"):
        best(*alike)
    assert best(*alike, failed) == [0]
    with raises_coded(ConfigError, "empty", "--best"):  # mean 0.35
        best(*alike, failed, silent)
    taken = choose_attempts([*alike, failed, silent], everything, only_best=False)
    assert [[attempt.rollout.index for attempt in group] for group in taken] == [[0, 1]]


def test_the_best_attempt_counts_the_rewards_of_its_calls():
    plain = made(0.5, index=0)
    call = dataclasses.replace(plain.trajectory.transitions[0], reward=0.3)
    helped = made(0.4, index=1)
    helped = Attempt(helped.rollout, dataclasses.replace(helped.trajectory, transitions=(call,)))
    groups = choose_attempts([plain, helped], parse_condition("reward > 0"), only_best=True)
    assert groups == [[helped]]


def test_sequences_by_hand():
    forced = transition([1], [2, 3, 4], forced=(False, True, False))
    other = dataclasses.replace(transition([5, 6], [7]), answered_by="b")
    attempt = Attempt(made(1.0).rollout, trajectory(forced, other))
    alone = attempt_sequences([[attempt]], {})
    assert [item.prompt_token_ids for item in alone] == [(1,), (5, 6)]
    assert [item.response_token_ids for item in alone] == [(2, 3, 4), (7,)]
    assert alone[0].loss_mask == (True, False, True) and alone[0].advantage == 1.0
    assert [item.weight for item in alone] == [0.25, 0.25] and alone[0].adapter is None
    named = dataclasses.replace(forced, answered_by="a")
    attempt = Attempt(made(1.0).rollout, trajectory(named, other))
    parts = attempt_sequences([[attempt]], {"a": 0, "b": 1})
    assert [(item.adapter, item.weight) for item in parts] == [(0, 1 / 3), (1, 1.0)]


def test_the_token_ids_are_those_in_the_store(run_dir: Path):
    attempts = attempts_of(run_dir)
    assert len(attempts) == 12
    store = Store(run_dir / "store.sqlite", read_only=True)
    for attempt in attempts:
        spans = store.spans(attempt.rollout.rollout_id)
        recorded = [
            (
                tuple(span.attributes[attributes.PROMPT_TOKEN_IDS]),
                tuple(span.attributes[attributes.RESPONSE_TOKEN_IDS]),
            )
            for span in spans
            if attributes.RESPONSE_TOKEN_IDS in span.attributes
        ]
        items = attempt_sequences([[attempt]], {})
        assert recorded == [(item.prompt_token_ids, item.response_token_ids) for item in items]
    store.close()


@pytest.mark.parametrize("start", ["policy", "model"])
def test_the_attempts_become_likelier(run_dir: Path, tmp_path: Path, start):
    out = tmp_path / "out"
    config = settings(run_dir, out, "warmup.optimizer.learning_rate=0.01")
    choice = Choice(parse_condition("reward >= 0"), num_steps=8)
    rows = learn_from_attempts(run_dir, config, choice, start)
    losses = [row["warmup/loss"] for row in rows]
    assert len(rows) == 8 and losses[-1] < losses[0] - 0.5
    assert rows == read_metrics(out / "metrics.jsonl")
    assert rows[0]["warmup/num_tasks"] == 4.0 and rows[0]["warmup/num_conversations"] == 12.0
    assert json.loads((out / "policy.json").read_text()) == {"step": 8}
    assert load_config(Config, [str(out / "config.yaml")]).num_steps == 8
    before, after = load_model(str(run_dir / "policy")), load_model(str(out / "policy"))
    assert before.config == after.config
    change = np.abs(before.params["embed"]["embedding"] - after.params["embed"]["embedding"]).max()
    assert change > 1e-3
    with raises_coded(ConfigError, "exists", "run_dir"):
        learn_from_attempts(run_dir, config, choice, start)


def test_the_command_writes_a_run_beside_the_other(run_dir: Path, capsys):
    assert main(["sft", str(run_dir), "--where", "reward >= 0", "--best"]) == 0
    assert "1 steps" in capsys.readouterr().out
    out = run_dir.with_name("run-sft")
    assert (out / "policy" / "config.json").is_file() and (out / "ended.json").is_file()
    (row,) = read_metrics(out / "metrics.jsonl")
    earned: dict[str, set[float]] = {}
    for attempt in attempts_of(run_dir):
        earned.setdefault(attempt.rollout.group_id, set()).add(attempt.total_reward)
    assert row["warmup/num_conversations"] == sum(len(found) > 1 for found in earned.values()) > 0
    assert main(["sft", str(run_dir), "--where", "reward"]) == 1
    assert main(["sft", str(run_dir / "absent")]) == 1


def test_the_best_by_other_rewards_are_learned(run_dir: Path, tmp_path: Path):
    functions = tmp_path / "rewards.py"
    functions.write_text(
        "def last(task, attempts):\n    return [*[0.0] * (len(attempts) - 1), 5.0]\n"
    )
    file = tmp_path / "rewards.yaml"
    file.write_text("rewards: {last: {group: rewards.py:last}}\n")
    out = tmp_path / "out"
    flags = ["--rewards", str(file), "--where", "reward == 5 and last == 5 and index == 2"]
    assert main(["sft", str(run_dir), *flags, f"run_dir={out}"]) == 0
    (row,) = read_metrics(out / "metrics.jsonl")
    assert row["warmup/num_conversations"] == 4.0
    assert list(load_config(Config, [str(out / "config.yaml")]).rewards) == ["last"]


def test_policies_without_one_model_to_start_from_are_refused(run_dir: Path, tmp_path: Path):
    choice = Choice(parse_condition("reward >= 0"))
    named = ("policies.a.base=null", "policies.b.base=null")
    whole = settings(run_dir, tmp_path / "whole", *named)
    with raises_coded(ConfigError, "unsupported", "policies"):
        learn_from_attempts(run_dir, whole, choice, "model")
    adapters = settings(run_dir, tmp_path / "adapters", *named, "model.lora.rank=2")
    with raises_coded(ConfigError, "not_exported", "--start"):
        learn_from_attempts(run_dir, adapters, choice, "policy")
    assert not (tmp_path / "whole").exists() and not (tmp_path / "adapters").exists()
