"""Tests of environments by name: `lightning-jax envs` and `new --env`."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from lightning_jax.cli import catalog
from lightning_jax.cli.catalog import ENVIRONMENTS
from lightning_jax.cli.main import main
from lightning_jax.settings import load_config
from lightning_jax.testing.tiny import TINY_RUN
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.tasks.data import load_tasks

EXPERIMENTS = [name for name, environment in ENVIRONMENTS.items() if environment.config]
# `tiny` reads bytes, so that a prompt is long.
SETTINGS = TINY_RUN | {
    "model.name": "tiny",
    "serve.max_len": 2048,
    "batch.row_len": 2048,
    "eval.num_tasks": 1,
    "rollout.concurrency": 1,
}
TASK = {
    "instruction.md": "Write hello to a.txt.",
    "task.toml": "[metadata]\n",
    "tests/test.sh": "echo 0.5 > /logs/verifier/reward.txt",
}


def outputs(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what `new` prints on standard error, in one line, for arguments that it refuses."""
    capsys.readouterr()
    assert main(["new", str(folder), *arguments]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert not folder.exists()
    return line


def test_list_has_a_line_for_each_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs"]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    names = [line.split()[0].partition(":")[0] for line in lines]
    assert names == [*ENVIRONMENTS, "--mcp"]
    required = {"spider", "sums", "dates", "calcx", "musique", "note", "files"}
    assert required | {"gym", "harbor", "verifiers"} == set(names) - {"--mcp"}
    assert main(["envs", "smus"]) == 1
    assert "sums" in capsys.readouterr().err


def test_list_names_packages_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_jax.cli.commands.envs.installed_version", lambda name: None)
    assert main(["envs", "spider"]) == 0
    assert "langgraph, langchain-openai" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_directory_of_an_experiment_needs_no_other_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert main(["new", str(folder), "--env", name]) == 0
    config = (folder / "config.yaml").read_text()
    assert "../" not in config and "run_dir: runs/first\n" in config
    monkeypatch.chdir(folder)
    assert main(["config", "check", "config.yaml"]) == 0
    for path in catalog.files_of(config):
        original = catalog.EXAMPLES / path
        assert (folder / path).read_bytes() == original.read_bytes()


def test_directory_of_an_environment_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_sigterm: None
) -> None:
    folder = tmp_path / "mine"
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["new", str(folder), "--env", "sums"]) == 0
    monkeypatch.chdir(folder)
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    assert main(["train", *settings]) == 1  # a random model earns the same with each attempt
    with closing(Store(folder / "runs/first/store.sqlite")) as store:
        assert {rollout.status for rollout in store.rollouts()} == {"scored"}


def test_harbor_directory_runs_its_agent_in_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_sigterm: None
) -> None:
    for number in range(2):
        for name, text in TASK.items():
            path = tmp_path / f"tasks/{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    folder = tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    assert main(["new", str(folder), "--env", "harbor:tasks"]) == 0
    monkeypatch.chdir(folder)
    config = load_config(Config, ["config.yaml"])
    assert config.data.root == str(tmp_path / "tasks")
    assert len(load_tasks(config)[0]) == 1
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    assert main(["try", *settings, "--record", "runs.sqlite"]) == 0
    with closing(Store(folder / "runs.sqlite")) as store:
        (rollout,) = store.rollouts()
        assert rollout.reward == 0.5 and store.spans(rollout.rollout_id)


@pytest.mark.parametrize("name", ["smus", "gym", "sums:3", "harbor:/nowhere", ""])
def test_unusable_names_leave_no_directory(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = outputs(tmp_path / "mine", capsys, "--env", name)
    assert "did you mean sums?" in line or name != "smus"


def test_template_and_environment_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs(tmp_path / "mine", capsys, "--env", "sums", "--template", "tools")


def test_installation_without_examples_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalog, "EXAMPLES", tmp_path)
    assert "repository" in outputs(tmp_path / "mine", capsys, "--env", "sums")


def test_settings_replace_values_and_keep_comments() -> None:
    text = "a: 1\ndata:\n  root: x  # here\n  a: 2\n"
    expected = 'a: [3]\ndata:\n  root: "#y"  # here\n  a: 2\n'
    assert catalog.with_settings(text, {"a": [3], "root": "#y"}) == expected
