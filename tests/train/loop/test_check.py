"""Tests of the checks before a run starts, and that they do not wait for JAX."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded

from lightning_jax.errors import UserError
from lightning_jax.models.model_files import ModelError
from lightning_jax.settings import ConfigError, load_config, save_config
from lightning_jax.train.config import Config
from lightning_jax.train.loop.check import check_start

# Runs commands in a fresh process, and prints the exit codes and whether one imported JAX.
COMMANDS = """
import json, sys
from lightning_jax.cli.main import main
print(json.dumps([[main(c) for c in json.loads(sys.argv[1])], "jax" in sys.modules]))
"""


def _check(*settings: str) -> None:
    check_start(load_config(Config, settings))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("import no_such_framework\n\ndef run(task, llm):\n    return 1.0\n")
    Path("tasks.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    Path("config.yaml").write_text("data: {root: tasks.jsonl}\nagent: {function: agent.py:run}\n")
    Path("file").touch()
    return tmp_path


def test_what_can_be_told_without_jax_is_told_before_it_is_imported(project: Path) -> None:
    commands = [
        ["train", "nothing.yaml"],
        ["train", "--config", "config.yaml", "nmu_steps=3"],
        ["train", "config.yaml", "learning_rate=1e-5"],
        ["train", "config.yaml", "serve.slots=0"],
        ["train", "config.yaml", "data.root=gone.jsonl"],
        ["train", "config.yaml", "agent.function=gone.py:run"],
        ["train", "config.yaml", "agent.function=agent.py:walk"],
        ["train", "config.yaml", "agent.function=null"],
        ["train", "config.yaml", "run_dir=file"],
        ["train", "config.yaml", "model.name=./gone"],
        ["train", "config.yaml", "model.chat_template=gone.jinja"],
        ["worker", "config.yaml", "--server", "http://127.0.0.1:9", "--key", "k"],
        ["plan", "nothing.yaml"],
        ["plan", "config.yaml", "model.name=gone.gguf"],
        ["view", "nothing"],
        ["verify", "nothing"],
    ]
    run = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    codes, imports_jax = json.loads(done.stdout)
    assert codes == [1] * len(commands) and not imports_jax
    assert done.stderr.count("error: ") == done.stderr.count("\n") == len(commands), done.stderr


def test_a_run_that_can_start_is_not_refused(project: Path) -> None:
    _check("config.yaml")  # the agent's imports are not tried
    _check("config.yaml", "run_dir=new/run", "agent.python=python3")
    _check("config.yaml", "agent.function=null", "agent.command=sh agent.sh")


@pytest.mark.parametrize(
    ("settings", "kind", "reason", "key"),
    [
        (["agent.function=null"], ConfigError, "missing", "agent.function"),
        (["agent.function=gone.py:run"], ConfigError, "not_found", "gone.py"),
        (["agent.function=agent.py:walk"], ConfigError, "no_such_function", "walk"),
        (["agent.python=gone/python"], ConfigError, "not_found", "agent.python"),
        (["agent.command=gone/agent"], ConfigError, "not_found", "agent.command"),
        (["data.load=gone.py:load"], ConfigError, "not_found", "gone.py"),
        (["algorithm.loss=agent.py:loss"], ConfigError, "no_such_function", "loss"),
        (
            ["warmup.demonstrations=agent.py:show", "warmup.num_steps=1"],
            *(ConfigError, "no_such_function", "show"),
        ),
        (["model.name=./gone"], ModelError, "not_found", "./gone"),
        (["policies.a.base=gone.gguf"], ModelError, "not_found", "gone.gguf"),
        (["run_dir=file"], ConfigError, "not_a_directory", "run_dir"),
        (["run_dir=file/below"], ConfigError, "not_a_directory", "run_dir"),
    ],
)
def test_a_run_that_cannot_start_is_refused(
    settings: list[str], kind: type[UserError], reason: str, key: str, project: Path
) -> None:
    with raises_coded(kind, reason, key):
        _check("config.yaml", *settings)


@pytest.mark.parametrize(
    ("began", "now", "key"),
    [
        (["model.lora.rank=4"], ["model.lora.rank=8"], "model.lora.rank"),
        (["model.lora.rank=4"], ["model.lora.rank=0"], "model.lora.rank"),
        ([], ["model.lora.alpha=3"], None),  # without adapters it has no effect
        (["policies.a={}"], ["policies.a={}", "policies.b={}"], "policies"),
        (["policies.a={}"], ["policies.a.base=tiny"], None),
        ([], ["optimizer.learning_rate=1", "model.name=tiny"], None),
    ],
)
def test_a_run_with_a_checkpoint_of_other_weights_is_refused(
    began: list[str], now: list[str], key: str | None, project: Path
) -> None:
    argv: list[Any] = ["config.yaml", "run_dir=run"]
    Path("run").mkdir()
    save_config(load_config(Config, [*argv, *began]), Path("run/config.yaml"))
    _check(*argv, *now)  # nothing was trained yet
    Path("run/checkpoints/2").mkdir(parents=True)
    if key is None:
        _check(*argv, *now)
    else:
        with raises_coded(ConfigError, "mismatch", key):
            _check(*argv, *now)


def test_damaged_settings_of_a_run_are_told(project: Path) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("- 1\n")
    with raises_coded(ConfigError, "malformed", "run/config.yaml"):
        _check("config.yaml", "run_dir=run")
