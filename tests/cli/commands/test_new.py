"""Tests of `lightning-jax new` and its templates."""

import json
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

from lightning_jax.cli.catalog import ENVIRONMENTS, STARTER
from lightning_jax.cli.commands.new import NEEDED, NUM_TASKS, TEMPLATES
from lightning_jax.cli.main import main
from lightning_jax.environments import harbor
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


CLIS = {
    "claude-code": "claude",
    "codex": "codex",
    "gemini-cli": "gemini",
    "opencode": "opencode",
    "qwen-code": "qwen",
}
# Stand-in for a coding agent: one call, then the work of the first two levels.
CLI = """#!{python}
import json, os, sys, urllib.request
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
with open("{prompt}") as file:
    messages = [{{"role": "system", "content": file.read()}}]
messages.append({{"role": "user", "content": sys.argv[-1]}})
body = json.dumps({{"messages": messages, "max_tokens": 4}}).encode()
headers = {{"Authorization": "Bearer " + key, "Content-Type": "application/json"}}
urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)).read()
assert sys.stdin.read() == ""
"""


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name not in CLIS])
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


def test_template_of_a_coding_agent_runs_its_command_in_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_sigterm: None
) -> None:
    folder, programs = tmp_path / "mine", tmp_path / "bin"
    assert main(["new", str(folder), "--template", "claude-code"]) == 0
    programs.mkdir()
    text = CLI.format(python=sys.executable, prompt=folder / "agent/prompt.md")
    (programs / "claude").write_text(text)
    (programs / "claude").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.chdir(folder)
    record = folder / "tried.sqlite"
    settings = [f"{key}={value}" for key, value in SETTINGS.items() if key != "eval.num_tasks"]
    assert main(["try", "--record", str(record), *settings]) == 0
    with closing(Store(record)) as store:
        (rollout,) = store.rollouts()
        roles = [span.attributes.get("lightning.role") for span in store.spans(rollout.rollout_id)]
    assert (rollout.status, rollout.reward) == ("scored", 0.0)
    assert "agent" in roles and "side" not in roles


@pytest.mark.parametrize(("template", "program"), CLIS.items())
def test_template_of_a_coding_agent_names_what_is_missing(
    template: str,
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_sigterm: None,
) -> None:
    folder = tmp_path / "mine"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["new", str(folder), "--template", template]) == 0
    (line,) = load_config(Config, [str(folder / "config.yaml")]).agent.options["programs"].values()
    assert f"{line}   #" in capsys.readouterr().out
    for split, number in NUM_TASKS.items():
        assert len(harbor.read_tasks(folder / "tasks" / split, folder)[0]) == number
    monkeypatch.chdir(folder)
    assert main(["config", "check", "config.yaml"]) == 0
    capsys.readouterr()
    assert main(["try", "model.name=tiny"]) != 0
    errors = capsys.readouterr().err.splitlines()
    assert [text for text in errors if program in text and line in text]


@pytest.mark.parametrize("template", CLIS)
def test_files_of_a_coding_agent_are_well_formed(template: str) -> None:
    folder = STARTER / template / "agent"
    subprocess.run(["sh", "-n", folder / "agent.sh"], check=True)
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    for path in folder.glob("*.toml"):
        tomllib.loads(path.read_text())
    roles = load_config(Config, [str(folder.parent / "config.yaml")]).roles
    prompt = (folder / "prompt.md").read_text()
    assert prompt.startswith(str(roles["agent"].system))
    assert [name for name, role in roles.items() if role.trains] == ["agent"]
    assert next(reversed(roles)) == "side" and roles["side"].fits_all


def test_each_template_has_a_folder_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    of_environments = {environment.template for environment in ENVIRONMENTS.values()} - {None}
    assert {line.split()[0] for line in lines} == set(TEMPLATES)
    assert {path.name for path in STARTER.iterdir()} == set(TEMPLATES) | of_environments | {"mcp"}
    agents = [STARTER / name / "agent.py" for name in TEMPLATES]
    assert all(len(path.read_text().splitlines()) <= 40 for path in agents if path.exists())


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
