"""Tests of paths in settings: relative to the file that holds them, absolute where saved."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_jax.settings import changed_keys, load_config, save_config
from lightning_jax.train.config import Config

TEXT = """
run_dir: runs/first
data: {root: tasks.jsonl, load: ../load.py:tasks}
agent:
  function: agent.py:run
  python: .venv/bin/python
model: {name: models/mine}
algorithm: {loss: "loss.py:mine", credit: per_step}
policies: {a: {base: ./models/other}, b: {base: someone/model}}
warmup: {demonstrations: "mine.module:show"}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project below the working directory, with a config and what it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dates" / "models" / "mine").mkdir(parents=True)
    (tmp_path / "dates" / "tasks.jsonl").touch()
    (tmp_path / "dates" / "config.yaml").write_text(TEXT)
    return tmp_path / "dates"


def test_paths_in_a_file_are_relative_to_the_file(folder: Path) -> None:
    config = load_config(Config, ["dates/config.yaml"])
    assert config.agent.function == "dates/agent.py:run"
    assert config.agent.python == "dates/.venv/bin/python"
    assert (config.data.root, config.data.load) == ("dates/tasks.jsonl", "load.py:tasks")
    assert config.model.name == "dates/models/mine"
    assert (config.algorithm.loss, config.algorithm.credit) == ("dates/loss.py:mine", "per_step")
    assert [policy.base for policy in config.policies.values()] == [
        "./dates/models/other",
        "someone/model",
    ]
    assert config.warmup.demonstrations == "mine.module:show"
    assert config.run_dir == "runs/first"


def test_paths_in_key_value_are_relative_to_the_working_directory(folder: Path) -> None:
    settings = ["agent.function=agent.py:run", "data.root=tasks.jsonl", "model.name=models/mine"]
    config = load_config(Config, ["dates/config.yaml", *settings])
    assert config.agent.function == "agent.py:run"
    assert (config.data.root, config.model.name) == ("tasks.jsonl", "models/mine")


def test_names_and_absolute_paths_stay(folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_text(
        "data: {root: openai/gsm8k}\nagent: {function: /opt/agent.py:run, python: python3}\n"
        "model: {name: Qwen/Qwen3-8B}\n"
    )
    config = load_config(Config, ["dates/config.yaml"])
    assert (config.agent.function, config.agent.python) == ("/opt/agent.py:run", "python3")
    assert (config.data.root, config.model.name) == ("openai/gsm8k", "Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("node agent.mjs --fast", ("node", "dates/agent.mjs", "--fast")),
        ("[bin/agent, agent.mjs, other.mjs]", ("dates/bin/agent", "dates/agent.mjs", "other.mjs")),
        ("sh -c 'echo 1'", ("sh", "-c", "echo 1")),
    ],
)
def test_files_of_a_command_are_found_beside_the_config(
    command: str, words: tuple[str, ...], folder: Path
) -> None:
    (folder / "agent.mjs").touch()
    (folder / "config.yaml").write_text(f"agent:\n  command: {command}\n")
    assert load_config(Config, ["dates/config.yaml"]).agent.command == words


def test_each_file_has_its_own_folder(folder: Path) -> None:
    (folder.parent / "top.yaml").write_text("base: dates/config.yaml\nagent: {python: bin/py}\n")
    config = load_config(Config, ["top.yaml"])
    assert (config.agent.function, config.agent.python) == ("dates/agent.py:run", "bin/py")


def test_a_link_to_a_config_does_not_move_its_parent(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder.parent / "link").symlink_to(folder / "deep" / "er")
    (folder / "deep" / "er" / "c.yaml").write_text("agent: {function: ../agent.py:run}\n")
    function = load_config(Config, ["link/c.yaml"]).agent.function
    assert function and Path(function.partition(":")[0]).parent.resolve() == folder / "deep"


def test_a_saved_file_holds_absolute_paths_and_means_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(Config, ["dates/config.yaml"])
    saved = folder / "runs" / "config.yaml"
    saved.parent.mkdir()
    save_config(config, saved)
    assert OmegaConf.load(saved).agent.function == f"{folder}/agent.py:run"
    assert changed_keys(saved, config) == []
    old = OmegaConf.load(saved)  # as an earlier release wrote it
    old.agent.function, old.data.root = "dates/agent.py:run", "dates/tasks.jsonl"
    OmegaConf.save(old, saved)
    assert changed_keys(saved, config) == []
    monkeypatch.chdir(folder)
    assert changed_keys(saved, load_config(Config, ["config.yaml"])) == [
        "agent.function",
        "data.root",
    ]
    save_config(load_config(Config, ["config.yaml"]), saved)
    monkeypatch.chdir(folder.parent)
    assert changed_keys(saved, config) == []
