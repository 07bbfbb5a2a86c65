"""Faults of the machine beside rollouts: they never become a reward."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from arena import SERVE

from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.grammar import process as grammar_process
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.testing.service import run_service
from lightning_jax.types import LLM, Rollout, Task


async def _ask(llm: LLM, **fields: Any) -> None:
    """Call the policy once. Raise an error for any answer but 200."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": "?"}]} | fields
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{llm.base_url}/chat/completions", json=body) as answer,
    ):
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {await answer.text()}")


async def _run(
    path: Path, model: LoadedModel, engine: SlotPrograms, agent: Any, **settings: Any
) -> tuple[Rollout, list[Rollout]]:
    """Return the rollout of one task, and all its attempts."""
    config = RolloutConfig(retry_delay_s=0.0, **settings)
    async with run_service(path, model, engine, SERVE) as service:
        runner = Runner(agent, service.gateway, config, seed=0)
        (rollout,) = await run_requests(make_requests([{"id": "a"}], "train", 0, 1), runner)
        return rollout, runner.store.rollouts()


def _hold_lock(path: Path, seconds: float) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)


async def test_locked_store_is_not_the_agents_time(
    tmp_path: Path, model: LoadedModel, engine: SlotPrograms
) -> None:
    locking: list[asyncio.Task[None]] = []

    async def agent(task: Task, llm: LLM) -> float:
        if not locking:
            hold = asyncio.to_thread(_hold_lock, tmp_path / "store.sqlite", 4.0)
            locking.append(asyncio.create_task(hold))
            await asyncio.sleep(0.1)
        await _ask(llm, max_tokens=2)
        return 1.0

    rollout, attempts = await _run(tmp_path, model, engine, agent, timeout_s=2.0)
    assert (rollout.status, rollout.reward) == ("scored", 1.0)
    assert {r.status for r in attempts} <= {"scored", "infrastructure_failure"}
    await locking[0]


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="looks into /proc")
async def test_grammar_process_that_the_kernel_kills_costs_an_attempt(
    tmp_path: Path,
    model: LoadedModel,
    engine: SlotPrograms,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    ordinary = grammar_process.Matcher.push

    def push(self: grammar_process.Matcher, token_id: int) -> None:
        """Kill the process, as the kernel does, before the first token."""
        if not killed:
            killed.extend(_grammar_processes())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        ordinary(self, token_id)

    async def agent(task: Task, llm: LLM) -> float:
        schema = {"type": "object", "properties": {"kernel": {"const": "kills"}}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        await _ask(llm, max_tokens=40, response_format=form)
        return 1.0

    monkeypatch.setattr(grammar_process.Matcher, "push", push)
    rollout, attempts = await _run(tmp_path, model, engine, agent)
    assert (rollout.status, rollout.attempt) == ("scored", 2)
    assert [(r.status, r.reason) for r in attempts[:1]] == [
        ("infrastructure_failure", "engine_error")
    ]


def _grammar_processes() -> list[int]:
    """Return the processes of single grammars: children of this process's fork servers."""
    found = []
    for server in _children(os.getpid()):
        command = Path(f"/proc/{server}/cmdline").read_bytes()
        if b"grammar/child.py" in command:
            found += _children(server)
    return found


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]
