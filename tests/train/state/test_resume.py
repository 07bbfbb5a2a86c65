"""Tests that named files and tasks are compared between starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from coded import raises_coded

from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import Config, WarmupConfig
from lightning_jax.train.directory import SOURCES
from lightning_jax.train.state.resume import changed_sources, digests, find_changes


@pytest.mark.parametrize("text", ["", '{"train tasks": "ab', "[1]"])
def test_damaged_digests_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / SOURCES).write_text(text)
    with raises_coded(ConfigError, "malformed", str(tmp_path / SOURCES)):
        changed_sources(tmp_path, {})


def test_what_an_update_recomputes_makes_no_other_run(tmp_path: Path) -> None:
    keys = ["model.remat", "mesh.fsdp", "model.dtype"]
    assert find_changes(tmp_path, keys, {}) == ["model.dtype"]


def test_an_edited_file_and_other_tasks_are_named(tmp_path: Path) -> None:
    agent, script = tmp_path / "agent.py", tmp_path / "agent.sh"
    agent.write_text("one")
    script.write_text("one")
    config = Config(
        agent=AgentConfig(f"{agent}:run"), warmup=WarmupConfig(demonstrations=f"{agent}:show")
    )
    program = Config(agent=AgentConfig(command=f"sh {script} --fast", reward=f"{agent}:judge"))
    tasks = [{"id": "a", "text": "x", "url": "http://127.0.0.1:1/", "db": "/one/db"}]
    moved = [task | {"url": "http://127.0.0.1:2/", "db": "/another/db"} for task in tasks]
    other = [task | {"text": "y"} for task in tasks]
    assert changed_sources(tmp_path, digests(config, tasks, [])) == []
    saved = digests(config, tasks, []) | digests(program, tasks, [])
    (tmp_path / SOURCES).write_text(json.dumps(saved))
    assert changed_sources(tmp_path, digests(config, moved, [])) == []
    assert changed_sources(tmp_path, digests(config, other, tasks)) == ["dev tasks", "train tasks"]
    agent.write_text("two")
    script.write_text("two")
    assert changed_sources(tmp_path, digests(config, tasks, [])) == [
        "agent.function (its file)",
        "warmup.demonstrations (its file)",
    ]
    assert changed_sources(tmp_path, digests(program, tasks, [])) == [
        f"agent.command's {script} (its file)",
        "agent.reward (its file)",
    ]


def test_another_source_of_the_agent_function_is_named(tmp_path: Path) -> None:
    def first(task: object, llm: object) -> float:
        return 1.0

    def second(task: object, llm: object) -> float:
        return 0.5

    config = Config(agent=AgentConfig("no_such_file.py:run"))
    (tmp_path / SOURCES).write_text(json.dumps(digests(config, [], [], first)))
    assert changed_sources(tmp_path, digests(config, [], [], first)) == []
    assert changed_sources(tmp_path, digests(config, [], [], second)) == ["agent (its source)"]
    assert changed_sources(tmp_path, digests(config, [], [], abs)) == []  # has no source


def test_sets_and_objects_are_the_same_in_every_process() -> None:
    code = (
        "from lightning_jax.train.config import Config\n"
        "from lightning_jax.train.state.resume import digests\n"
        "class Thing: pass\n"
        "task = {'id': 'a', 'answers': {'x', 'y', 'z'}, 'thing': Thing(), 'keys': {1: 2, 'a': 3}}\n"
        "print(digests(Config(), [task], [])['train tasks'])\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != ""
