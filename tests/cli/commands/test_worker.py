"""Tests of `lightning-jax worker`: it takes rollouts without JAX, and stops in good order."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from agent_folder import write_folder
from waiting import until

from lightning_jax.cli.main import main
from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.calls.remote import RemoteEngine, remote_role, remote_routing
from lightning_jax.gateway.sessions.leases import LeaseQueue
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.rollouts.workers.pool import WorkerPool
from lightning_jax.rollouts.workers.work import fingerprint
from lightning_jax.traces.store import TemporaryStore

pytestmark = pytest.mark.slow

AGENT = """
import asyncio
import pathlib


async def run(task, llm, *, seconds=0.0):
    pathlib.Path("began").touch()
    await asyncio.sleep(seconds)
    return {"reward": 0.5}
"""


AHEAD = ("rollout.ahead=3", "algorithm.proximal=old", "algorithm.correction=truncate")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_folder(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_KEY", raising=False)
    return tmp_path


@asynccontextmanager
async def _serving(agent: AgentConfig) -> AsyncIterator[tuple[Runner, LeaseQueue]]:
    """Yield a runner whose rollouts wait for workers, and their queue. No model is loaded."""
    routing = remote_routing({}, remote_role("http://127.0.0.1:9/v1"))
    with contextlib.closing(TemporaryStore()) as store:
        engine = RemoteEngine("none", ServeConfig(api_key="right"))
        async with (
            Gateway(engine, store, routing=routing) as gateway,
            gateway.work.opened(fingerprint(agent), 30.0) as queue,
        ):
            config = RolloutConfig(retry_delay_s=0.0)
            yield Runner(WorkerPool(queue), gateway, config, seed=0), queue


@contextmanager
def _worker(url: str, *arguments: str, key: str = "right") -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a worker's process. What it prints is in the file `errors`."""
    command = [sys.executable, "-X", "importtime", "-m", "lightning_jax", "worker"]
    environment = os.environ | {"LIGHTNING_KEY": key}
    with open("errors", "wb") as errors:
        process = subprocess.Popen(
            [*command, "--server", url, *arguments], stderr=errors, env=environment
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_worker_runs_rollouts_and_gives_them_back_at_ctrl_c(folder: Path) -> None:
    options = {"seconds": 1.0}
    async with _serving(AgentConfig("agent.py:run", options=options)) as (runner, queue):
        requests = make_requests([{"id": "a"}, {"id": "b"}], "train", 0, 1)
        running = asyncio.create_task(run_requests(requests, runner))
        setting, url = "agent.options.seconds=1.0", runner.gateway.url
        with _worker(url, "config.yaml", setting, *AHEAD, "--concurrency", "1") as stopping:
            await until((folder / "began").exists)
            stopping.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(stopping.wait) == 0
        errors = (folder / "errors").read_text()
        imported = {line.split("|")[-1].strip() for line in errors.splitlines()}
        assert "lightning_jax.rollouts.workers.worker" in imported and "Traceback" not in errors
        assert not imported & {"jax", "numpy"}
        assert queue.num_taken == 1 and queue.num_lost == 0
        with _worker(url, setting):
            assert [r.status for r in await running] == ["scored"] * 2
        assert {r.reason for r in runner.store.rollouts()} == {None, "worker_stopped"}


@pytest.mark.parametrize(
    ("key", "settings", "code"),
    [("wrong", [], "API key"), ("right", ["agent.options.seconds=3"], "agent.options")],
)
async def test_refused_worker_exits_with_one_sentence(
    folder: Path, key: str, settings: list[str], code: str
) -> None:
    async with _serving(AgentConfig("agent.py:run")) as (runner, queue):
        with _worker(runner.gateway.url, "config.yaml", *settings, key=key) as process:
            assert await asyncio.to_thread(process.wait) == 1
        errors = (folder / "errors").read_text()
        (sentence,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert code in sentence and "Traceback" not in errors
        assert queue.num_taken == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--server", "http://localhost:1"], "--key"),
        (["--server", "trainer:8000", "--key", "k"], "--server"),
        (["--server", "http://localhost:1", "--key", "k", "--concurrency", "0"], "--concurrency"),
        (["--server", "http://localhost:1", "--key", "k", "agent.function=no.py:run"], "no.py"),
    ],
)
def test_mistakes_give_one_sentence(
    folder: Path, arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", *arguments]) in (1, 2)
    errors = capsys.readouterr().err
    assert word in errors and errors.startswith("error: ") and errors.count("\n") == 1
