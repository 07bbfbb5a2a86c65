"""Tests of runs whose reward has components: functions, the group, and policies as judges."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import toy_agent
from coded import raises_coded

from lightning_jax.cli.main import main
from lightning_jax.cli.rescore import compare_rewards
from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig, PolicyConfig
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rollouts.config import AgentConfig, JudgeConfig, RewardConfig, RolloutConfig
from lightning_jax.rollouts.rewards.components import Attempt
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.studio.load import open_run as open_view
from lightning_jax.studio.page import render_page
from lightning_jax.traces.store import Store
from lightning_jax.train.config import CheckpointConfig, Config, EvalConfig
from lightning_jax.train.loop import trainer
from lightning_jax.train.loop.check import check_agent
from lightning_jax.train.watch.curves import describe, panels_of
from lightning_jax.types import Rollout, RolloutStatus, Task

pytestmark = pytest.mark.slow

TASKS: list[Task] = [{"id": f"t{i}", "question": "abcd"[i]} for i in range(4)]
INITIAL = JudgeConfig(reasons=False, max_tokens=200)


def length(task: Task, attempt: Attempt) -> float:
    assert task["question"] in attempt.transcript[0]["content"]
    return float(len(attempt.response))


def longest(task: Task, attempts: list[Attempt]) -> list[float]:
    sizes = [len(attempt.response) for attempt in attempts]
    return [float(size == max(sizes)) for size in sizes]


def _config(run_dir: Path, rewards: dict[str, RewardConfig], **changes: Any) -> Config:
    settings: dict[str, Any] = dict(
        run_dir=str(run_dir),
        num_steps=2,
        model=ModelConfig(name="tiny"),
        serve=ServeConfig(slots=4, max_len=2048, prefill_buckets=(128,)),
        agent=AgentConfig(f"{toy_agent.__file__}:run"),
        rollout=RolloutConfig(tasks_per_step=2, group_size=3, concurrency=8, retry_delay_s=0.0),
        rewards=rewards,
        batch=BatchConfig(rows=1, row_len=2048, max_targets=64, head_chunk=64),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        eval=EvalConfig(every=0, num_tasks=2, at_start=False),
        checkpoint=CheckpointConfig(every=1),
        mesh=MeshConfig(fsdp=1),
    )
    return Config(**settings | changes)


def test_components_reach_credit_metrics_and_the_views(tmp_path: Path) -> None:
    rewards = {
        "agent": RewardConfig(weight=0.0),
        "length": RewardConfig(weight=0.5, function=length),
        "longest": RewardConfig(group=longest),
        "judged": RewardConfig(weight=0.0, judge=INITIAL),
    }
    config = _config(tmp_path / "run", rewards)
    rows = asyncio.run(trainer.train(config, TASKS, TASKS))
    for row in rows[:2]:
        expected = 0.5 * row["reward/length_mean"] + row["reward/longest_mean"]
        assert row["rollout/reward_mean"] == pytest.approx(expected)
        assert 0 <= row["reward/judged_mean"] <= 1 and row["reward/judged_calls"] >= 1
        assert row["reward/judged_failed_calls"] == 0 and row["reward/judged_tokens"] > 0
        assert "reward/judged_failed" not in row
    last = rows[-1]
    assert last["eval/reward_mean"] == pytest.approx(0.5 * last["eval/reward_length_mean"])
    assert "eval/reward_longest_mean" not in last and "eval/reward_judged_mean" not in last
    assert all(describe(name) for row in rows for name in row if name != "step")
    titles = [panel.title for panel in panels_of(rows)[0]]
    assert [title for title in titles if title.startswith("reward ")] == [
        f"reward {name}" for name in ("and components", "agent", "judged", "length", "longest")
    ]
    for row in rows[:2]:
        assert 0 <= row["audit/near_copies"] <= 1 and 0 < row["audit/distinct_3"] <= 1
        assert row["audit/correlation/length~longest"] > 0
    with open_view(tmp_path / "run") as reader:
        (view,) = [reader.rollout("train-00000-000-00-1")]
        page = render_page(None, [view])
        assert set(view.rollout.components) == {"agent", "length", "longest", "judged"}
        assert "longest" in page
    # Another run of the same command has nothing to score. Other weights score the next step anew.
    saved = load_config(Config, [str(tmp_path / "run/config.yaml")], only=["rewards"])
    assert saved.rewards["length"].function == f"{__name__}:length"
    heavier = rewards | {"length": RewardConfig(weight=2.0, function=length)}
    longer = dataclasses.replace(config, num_steps=3, rewards=heavier)
    row = asyncio.run(trainer.train(longer, TASKS, TASKS))[2]
    expected = 2 * row["reward/length_mean"] + row["reward/longest_mean"]
    assert row["rollout/reward_mean"] == pytest.approx(expected)


def test_groups_that_run_ahead_are_scored_before_a_step_takes_them(tmp_path: Path) -> None:
    config = _config(tmp_path / "run", {"longest": RewardConfig(group=longest)}, num_steps=4)
    rollout = dataclasses.replace(config.rollout, ahead=2)
    algorithm = AlgorithmConfig(proximal="old", correction="truncate")
    config = dataclasses.replace(config, rollout=rollout, algorithm=algorithm)
    rows = asyncio.run(trainer.train(config, TASKS, TASKS))
    for row in rows[:4]:
        assert row["rollout/reward_mean"] == pytest.approx(row["reward/longest_mean"])
    store = Store(tmp_path / "run/store.sqlite", read_only=True)
    rollouts = [r for r in store.rollouts(phase="train") if r.status == "scored"]
    assert rollouts and all(rollout.components for rollout in rollouts)
    store.close()


def test_an_agent_without_a_reward_trains_on_the_judgement_of_another_policy(
    tmp_path: Path,
) -> None:
    policies = {"writer": PolicyConfig(), "critic": PolicyConfig(trains=False)}
    judge = dataclasses.replace(INITIAL, served_by="critic")
    config = _config(
        tmp_path / "run",
        {"judged": RewardConfig(judge=judge)},
        num_steps=1,
        policies=policies,
        model=ModelConfig(name="tiny", lora=LoraConfig(rank=2)),
        agent=AgentConfig(f"{__file__}:silent"),
    )
    rows = asyncio.run(trainer.train(config, TASKS, TASKS))
    assert rows[0]["rollout/num_scored"] == 6 and rows[0]["reward/judged_mean"] > 0
    assert rows[0]["rollout/reward_mean"] == pytest.approx(rows[0]["reward/judged_mean"])


async def silent(task: Task, llm: Any) -> None:
    """Call a policy and return no reward."""
    async with toy_agent._client(llm) as client:
        await client.chat.completions.create(
            model="writer",
            messages=[{"role": "user", "content": task["question"]}],
            max_tokens=4,
        )


def test_settings_from_yaml_are_checked_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def good(task, attempt):\n    return 1.0\n")
    (tmp_path / "rubric.yaml").write_text("criteria: {clear: {text: Clear, weight: 1}}")
    path, agent = tmp_path / "config.yaml", f"{toy_agent.__file__}:run"

    def load(**reward: Any) -> Config:
        text = {"agent": {"function": agent}, "rewards": {"mine": reward}}
        path.write_text(json.dumps(text))
        config = load_config(Config, [str(path)])
        check_agent(config)
        return config

    config = load(function="mine.py:good")
    assert config.rewards["mine"].function == f"{tmp_path}/mine.py:good"
    judge = {"served_by": "http://localhost:1/v1", "served_model": "m", "api_key_env": "MY_KEY"}
    with raises_coded(ConfigError, "missing", "MY_KEY"):
        load(judge=judge)
    monkeypatch.setenv("MY_KEY", "sk")
    assert load(judge=judge | {"rubric": "rubric.yaml"}).rewards["mine"].judge is not None
    with raises_coded(ConfigError, "no_such_function", "bad"):
        load(function="mine.py:bad")
    (tmp_path / "rubric.yaml").write_text("criteria: {clear: {text: Clear}}")
    with raises_coded(ConfigError, "missing", str(tmp_path / "rubric.yaml")):
        load(judge=judge | {"rubric": "rubric.yaml"})


REWARDS = """
rewards:
  agent: {weight: 0}
  short: {weight: -1, function: mine.py:length}
  judged: {judge: {reasons: false, max_tokens: 200}}
"""
MINE = """
def length(task, attempt):
    assert task["question"]
    return float(len(attempt.response))
"""


def test_rescore_compares_other_rewards_with_the_stored_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = _config(run, {"length": RewardConfig(function=length)}, num_steps=1)
    asyncio.run(trainer.train(config, TASKS, TASKS))
    (tmp_path / "mine.py").write_text(MINE)
    file = tmp_path / "rewards.yaml"
    file.write_text(REWARDS.partition("  judged")[0])
    store = Store(run / "store.sqlite", read_only=True)
    before = store.rollouts()
    store.close()
    assert main(["rescore", str(run), "--rewards", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "rank correlation with the stored reward: -1.000" in shown
    assert "6 of 2 groups" in shown and "short" in shown
    file.write_text(REWARDS)
    for _ in range(2):
        assert main(["rescore", str(run), "--rewards", str(file), "--limit", "1"]) == 0
        assert "judged" in capsys.readouterr().out
    assert main(["rescore", str(run), "--rewards", str(file), "--phase", "eval"]) == 0
    assert "judged" not in capsys.readouterr().out
    store = Store(run / "store.sqlite", read_only=True)
    assert store.rollouts() == before
    store.close()
    file.write_text("num_steps: 3\n")
    assert main(["rescore", str(run), "--rewards", str(file)]) == 1
    file.write_text("rewards: {bad: {function: mine.py:bad}}\n")
    (tmp_path / "mine.py").write_text("def bad(task, attempt):\n    raise KeyError('gold')\n")
    assert main(["rescore", str(run), "--rewards", str(file)]) == 1
    assert "bad_component" in capsys.readouterr().err


def test_a_comparison_counts_failures_and_flips() -> None:
    def of(reward: float | None, status: RolloutStatus = "scored") -> Rollout:
        return Rollout("r", "t", "g", "train", 0, 0, 1, status, reward)

    group = [(of(0.0), of(2.0)), (of(1.0), of(0.0)), (of(5.0), of(None, "agent_failure"))]
    found = compare_rewards([group, [(of(1.0), of(1.0))]])
    assert (found.num_groups, found.num_failed, found.flip_share) == (2, 1, pytest.approx(2 / 3))
    assert found.correlations == pytest.approx((-1.0,))
    assert compare_rewards([]).flip_share is None
