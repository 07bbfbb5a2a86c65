"""Tests of `lightning-jax rescore` with the rewards of the experiments' agents, on stored runs."""

import asyncio
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_jax.cli.rescore import by_evaluation
from lightning_jax.models.config import ModelConfig
from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.settings import save_config
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.loop.check import read_rewards
from lightning_jax.train.loop.rescored import rescored_groups
from lightning_jax.types import Rollout, Span, Task

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "agents"))
FIRST = "Which dogs are there?"
CHECK = "Result, 2 rows:\nIs this right? Reply CORRECT or WRONG."
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "70 + 2"}}\n</tool_call>'


def _store_run(run: Path, task: Task, attempts: Sequence[Sequence[str]]) -> None:
    """Write a run with an evaluation of these attempts. All earned 0.

    An attempt is a conversation: a prompt, a reply, what is added to the prompt, and so on.
    """
    run.mkdir()
    config = Config(
        run_dir=str(run), model=ModelConfig(name="tiny"), agent=AgentConfig(function="a.py:run")
    )
    save_config(config, run / "config.yaml")
    tokenizer = tiny_tokenizer()
    with closing(Store(run / "store.sqlite")) as store:
        for number, texts in enumerate(attempts):
            name = f"r{number}"
            rollout = Rollout(name, task["id"], f"g{number}", "eval", number, 0, 1, "queued")
            store.add_rollout(rollout, task)
            store.set_status(name, "running")
            read: list[int] = []
            for turn, (asked, reply) in enumerate(zip(texts[::2], texts[1::2], strict=True)):
                prompt = [*read, *tokenizer.encode(f"<|im_end|>\n<|im_start|>user\n{asked}")]
                response = tokenizer.encode(f"{reply}<|im_end|>")
                read = prompt + response
                found = {
                    attributes.POLICY: "policy",
                    attributes.PROMPT_TOKEN_IDS: tuple(prompt),
                    attributes.RESPONSE_TOKEN_IDS: tuple(response),
                    attributes.BEHAVIOR_LOGPROBS: (-1.0,) * len(response),
                    attributes.SAMPLING_LOGPROBS: (-1.0,) * len(response),
                    attributes.POLICY_VERSIONS: (0,) * len(response),
                    attributes.RESPONSE_FINISH_REASONS: ("stop",),
                }
                store.add_span(name, Span("t", f"{name}-{turn}", None, "chat", turn, turn, found))
            store.set_status(name, "scored", reward=0.0)


def _rescored(run: Path, agent: str) -> list[dict[str, float]]:
    """Return the components of each attempt by the file of an agent's rewards."""
    file = ROOT / "experiments" / "rewards" / f"{agent}.yaml"
    groups = asyncio.run(rescored_groups(run, read_rewards(file), phase="eval"))
    assert all(before.reward == 0.0 for group in groups for before, _ in group)
    for _, after in (pair for group in groups for pair in group):
        assert after.reward == after.components["reward"]
    return [dict(after.components) for group in groups for _, after in group]


def test_word_problems(tmp_path: Path) -> None:
    pytest.importorskip("autogen_agentchat", reason="needs AutoGen, of the extra calcx")
    task = {"id": "t", "question": "How many?", "result": "72"}
    attempts = [
        ["How many?", CALL, "72", r"The answer is \(\boxed{72}\)."],
        ["How many?", "The answer is 72.6"],
        ["How many?", *[CALL, "72"] * 7, CALL],  # out of calls
        ["How many?", CALL, "72", ""],
    ]
    _store_run(tmp_path / "run", task, attempts)
    assert _rescored(tmp_path / "run", "calcx") == [
        {"agent": 0.0, "reward": reward, "result_accuracy": accuracy}
        for reward, accuracy in ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    ]


def test_multi_hop_questions(tmp_path: Path) -> None:
    task = {"id": "t", "answer": "Oslo town", "answer_aliases": ["Oslo, Norway"]}
    attempts = [
        ["Where?", CALL, "A paragraph.", "<answer>Oslo Norway</answer>"],
        ["Where?", "It is <answer>Oslo"],
    ]
    _store_run(tmp_path / "run", task, attempts)
    assert _rescored(tmp_path / "run", "musique") == [
        {"agent": 0.0, "reward": pytest.approx(1.0), "em": 1.0, "f1": 1.0},
        {"agent": 0.0, "reward": pytest.approx(0.6), "em": 0.0, "f1": pytest.approx(2 / 3)},
    ]


def test_text_to_sql(tmp_path: Path) -> None:
    pytest.importorskip("langgraph", reason="needs LangGraph, of the extra spider")
    path = tmp_path / "pets.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "CREATE TABLE pet (name TEXT, kind TEXT);"
            "INSERT INTO pet VALUES ('Rex', 'dog'), ('Ace', 'dog'), ('Rex', 'dog');"
        )
    gold, rewrite = "SELECT kind, name FROM pet", "Write the corrected query."
    task: dict[str, Any] = {"id": "t", "query": gold, "db_path": str(path)}
    attempts = [
        [FIRST, "SELECT name, kind FROM pet", CHECK, "CORRECT"],  # columns in another order
        [FIRST, "SELECT DISTINCT kind, name FROM pet", CHECK, "CORRECT"],
        [FIRST, "SELECT name FROM pet", CHECK, "WRONG", rewrite, f"```sql\n{gold};\n```"],
        [FIRST, gold, CHECK, "WRONG", rewrite, ""],
        [FIRST, "SELECT nme FROM pet", f"Error: no such column\n{rewrite}", gold],
    ]
    _store_run(tmp_path / "run", task, attempts)
    assert [list(found.values()) for found in _rescored(tmp_path / "run", "spider")] == [
        [0.0, 1.0, 1.0],
        [0.0, 0.0, 1.0],
        [0.0, 1.0, 1.0],
        [0.0, 0.0, 0.0],
        [0.0, 1.0, 1.0],
    ]


def test_each_evaluation_has_a_line() -> None:
    def of(step: int, reward: float, accuracy: float) -> tuple[Rollout, Rollout]:
        before = Rollout("r", "t", "g", "eval", step, 0, 1, "scored", 0.25)
        after = replace(before, reward=reward, components={"agent": 0.25, "accuracy": accuracy})
        return before, after

    failed = Rollout("r", "t", "g", "eval", 3, 0, 1, "agent_failure", -1.0)
    lost = replace(failed, status="scored"), replace(failed, reason="bad_component")
    grid = by_evaluation([[of(3, 1.0, 0.5), (failed, failed)], [of(0, 0.5, 0.0)], [lost]])
    assert [column.name for column in grid.columns][1:] == [
        "n", "stored reward", "new reward", "agent", "accuracy"
    ]  # fmt: skip
    assert grid.rows == (
        ("0", "1", "0.2500", "0.5000", "0.2500", "0.0000"),
        ("3", "2", "0.1250", "0.5000", "0.1250", "0.2500"),  # a failed attempt counts as 0
    )
