"""Tests of runs whose agents change what the process shares: the run goes on as if they had not."""

import asyncio
import sys
import warnings
from pathlib import Path

import pytest

from lightning_jax.settings import load_config
from lightning_jax.system.process_state import kept_process
from lightning_jax.testing.tiny import TINY_RUN
from lightning_jax.train.config import Config
from lightning_jax.train.directory import with_fixed_paths
from lightning_jax.train.loop.inference import evaluate
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.tasks.data import load_tasks

AGENT = """
import logging, os, pathlib, shutil, signal, sys, tempfile, warnings

os.chdir("/")  # at import
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def load(root, split, cache_dir):
    os.chdir("/")
    return [{"id": f"{split}{n}", "q": str(n)} for n in range(2)], {}

def run(task, llm):
    assert "127.0.0.1" in os.environ["NO_PROXY"]
    gone = tempfile.mkdtemp()
    os.chdir(gone)
    shutil.rmtree(gone)
    os.umask(0o777)
    warnings.simplefilter("error", BytesWarning)
    logging.disable(logging.CRITICAL)
    sys.stdout = open(os.devnull, "w")
    sys.stdout.close()
    tempfile.tempdir = gone
    return 1.0

def demonstrate(tasks):
    os.chdir("/")
    return [
        [{"role": "user", "content": task["q"]}, {"role": "assistant", "content": "a"}]
        for task in tasks
    ]
"""


def test_a_run_keeps_its_files_and_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")  # no call of the run uses https
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    (tmp_path / "agent.py").write_text(AGENT)
    settings = {
        **TINY_RUN,
        "model.name": "tiny",
        "agent.function": "agent.py:run",
        "agent.workers": 0,
        "data.load": "agent.py:load",
        "run_dir": "runs/x",
        "rollout.concurrency": 1,
        "rollout.max_agent_failures": 1.0,  # it makes no call
        "warmup.num_steps": 1,
        "warmup.demonstrations": "agent.py:demonstrate",
    }
    config = load_config(Config, [f"{key}={value}" for key, value in settings.items()])
    filters = list(warnings.filters)
    with kept_process():  # as the command does
        fixed = with_fixed_paths(config)
        tasks = load_tasks(fixed)
        rows = asyncio.run(train(fixed, *tasks))
    assert [row["step"] for row in rows] == [0, 1, 2]
    directory = tmp_path / "runs" / "x"
    names = {path.name for path in directory.iterdir()}
    assert {"policy", "metrics.jsonl", "store.sqlite", "config.yaml", "checkpoints"} <= names
    assert Path.cwd() == tmp_path and warnings.filters == filters
    _, metrics = asyncio.run(evaluate(config, tasks[1], run_dir="runs/x"))
    assert metrics["eval/reward_mean"] == 1.0
    assert Path.cwd() == tmp_path
    sys.stdout.write("still here")  # it is not closed
    assert "still here" in capsys.readouterr().out
