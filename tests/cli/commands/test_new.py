"""Tests of `lightning-jax new` and its templates."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from lightning_jax.cli.catalog import ENVIRONMENTS, STARTER
from lightning_jax.cli.commands.new import NEEDED, TEMPLATES
from lightning_jax.cli.main import main
from lightning_jax.settings import load_config
from lightning_jax.testing.tiny import TINY_RUN
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config

# `tiny` reads bytes, so that a prompt with a tool is long.
SETTINGS = TINY_RUN | {
    "model.name": "tiny",
    "serve.max_len": 2048,
    "batch.row_len": 2048,
    "eval.num_tasks": 1,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_passes_the_check_and_its_rollouts_are_scored(
    template: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_sigterm: None,
) -> None:
    for distribution in NEEDED.get(template, ()):
        pytest.importorskip(distribution.replace("-", "_"))
    folder = tmp_path / "mine"
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["new", str(folder), "--template", template]) == 0
    monkeypatch.chdir(folder)
    assert main(["config", "check", "config.yaml"]) == 0
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    # 1: a random model earns the same with each attempt, so nothing is trained.
    assert main(["train", *settings]) == 1, capsys.readouterr()
    with closing(Store(folder / "runs/first/store.sqlite")) as store:
        rollouts = store.rollouts()
        calls = [len(store.spans(rollout.rollout_id)) for rollout in rollouts]
    assert [rollout.status for rollout in rollouts] == ["scored"] * 4  # 2, and 2 evaluations
    assert all(calls)


def test_each_template_has_a_folder_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    of_environments = {environment.template for environment in ENVIRONMENTS.values()} - {None}
    assert {line.split()[0] for line in lines} == set(TEMPLATES)
    assert {path.name for path in STARTER.iterdir()} == set(TEMPLATES) | of_environments | {"mcp"}
    for name in TEMPLATES:
        assert len((STARTER / name / "agent.py").read_text().splitlines()) <= 40


def test_partial_rewards_of_templates_stay_small() -> None:
    for name in TEMPLATES:
        config = load_config(Config, [str(STARTER / name / "config.yaml")])
        assert config.algorithm.normalize == "batch_std", name


def test_missing_packages_of_a_template_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(NEEDED, "tools", ("openai", "no-such-package"))
    assert main(["new", str(tmp_path / "mine"), "--template", "tools"]) == 0
    assert "pip install no-such-package " in capsys.readouterr().out
    assert main(["new", str(tmp_path / "other"), "--template", "dates"]) == 0
    assert "pip install" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "template"), [("langgraph", "langgraph"), ("planner_and_worker", "roles")]
)
def test_page_shows_the_agent_of_the_template(page: str, template: str) -> None:
    text = (Path(__file__).parents[3] / f"docs/frameworks/{page}.md").read_text()
    assert f"```python\n{(STARTER / template / 'agent.py').read_text()}```" in text
