"""Tests of baselines: rewards of answers that need no model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import toy_agent
from coded import raises_coded

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import MeshConfig, ModelConfig
from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import Config, EvalConfig
from lightning_jax.train.loop import trainer
from lightning_jax.train.tasks.pipelines import baseline_metrics
from lightning_jax.train.watch.curves import describe

AGENTS = Path(__file__).parents[3] / "agents"
SOURCE = """
def shares(tasks):
    return {"Always one": sum(task["n"] == 1 for task in tasks) / len(tasks)}

def broken(tasks):
    raise KeyError("n")

def listed(tasks):
    return [0.5]

def endless(tasks):
    return {"one": float("inf"), "two": 0.5}
"""
TASKS = [{"id": "a", "n": 1, "kind": "x"}, {"id": "b", "n": 2, "kind": "x"}, {"id": "c", "n": 1}]


def _config(tmp_path: Path, name: str, by: str | None = None) -> EvalConfig:
    (tmp_path / "mine.py").write_text(SOURCE)
    return EvalConfig(baselines=f"{tmp_path / 'mine.py'}:{name}", by=by)


def test_the_tasks_and_their_parts_have_baselines(tmp_path: Path) -> None:
    found = baseline_metrics(_config(tmp_path, "shares", "kind"), TASKS)
    assert found == {
        "eval/baseline_always_one": pytest.approx(2 / 3),
        "eval/baseline_always_one/kind=missing": 1.0,
        "eval/baseline_always_one/kind=x": 0.5,
    }
    assert all(describe(name) is not None for name in found)
    assert baseline_metrics(_config(tmp_path, "shares"), []) == {}
    assert baseline_metrics(EvalConfig(), TASKS) == {}


@pytest.mark.parametrize(
    "name, reason", [("broken", "failed"), ("listed", "wrong_type"), ("endless", "wrong_type")]
)
def test_a_bad_function_is_named(tmp_path: Path, name: str, reason: str) -> None:
    with raises_coded(ConfigError, reason, "eval.baselines"):
        baseline_metrics(_config(tmp_path, name), TASKS)


def test_the_agents_of_the_experiments_have_baselines() -> None:
    tasks: dict[str, dict[str, Any]] = {
        "number_answers": {"question": "9 and 4?", "result": "5"},
        "answer_score": {"answer": "Oslo", "answer_aliases": []},
        "sum_answers": {"answer": 4},
    }
    for agent, task in tasks.items():
        config = EvalConfig(baselines=f"{AGENTS / agent}.py:baselines")
        assert baseline_metrics(config, [task])["eval/baseline_constant"] == pytest.approx(1.0)


def test_an_evaluation_of_a_run_has_the_baselines(tmp_path: Path) -> None:
    config = Config(
        run_dir=str(tmp_path / "run"),
        num_steps=0,
        model=ModelConfig(name="tiny"),
        serve=ServeConfig(slots=2, max_len=128, prefill_buckets=(32,)),
        agent=AgentConfig(function=f"{toy_agent.__file__}:run"),
        eval=_config(tmp_path, "shares"),
        mesh=MeshConfig(fsdp=1),
    )
    tasks = [task | {"question": "?"} for task in TASKS]
    (row,) = asyncio.run(trainer.train(config, tasks, tasks))
    assert row["eval/num_tasks"] == 3
    assert row["eval/baseline_always_one"] == pytest.approx(2 / 3)
