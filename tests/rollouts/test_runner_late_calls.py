"""Tests of rollouts that meet their deadline in a call: what is trained, and who is to blame."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from slow_engine import SlowEngine

from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.sessions import open_rollouts
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.results.metrics import to_trajectories
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.traces.store import Store
from lightning_jax.types import LLM, Rollout, Task

TASKS: list[Task] = [{"id": "t0"}, {"id": "t1"}]


async def _call(llm: LLM, max_tokens: int) -> int:
    """Return the number of tokens in the answer."""
    body = {"model": "policy", "prompt": "?", "max_tokens": max_tokens}
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as http:
        reply = await (await http.post(f"{llm.base_url}/completions", json=body)).json()
    return reply["usage"]["completion_tokens"]


@asynccontextmanager
async def _runner(path: Path, agent: Any, **settings: Any) -> AsyncIterator[tuple[Runner, Any]]:
    settings = {"max_attempts": 1, "max_infrastructure_failures": 1.0} | settings
    engine = SlowEngine()
    with contextlib.closing(Store(path / "store.sqlite")) as store:
        async with Gateway(engine, store) as gateway:
            yield Runner(agent, gateway, RolloutConfig(**settings), seed=0), engine


async def _run(runner: Runner, number: int = 1) -> list[Rollout]:
    return await run_requests(make_requests(TASKS[:number], "train", 0, 1), runner)


@pytest.mark.parametrize("catches", [False, True])
async def test_late_call_is_in_the_trajectory_that_fails(tmp_path: Path, catches: bool) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        await _call(llm, 2)
        await _call(llm, 1500)
        while catches:  # a deadline is final, whatever the agent does with the answer
            with contextlib.suppress(aiohttp.ClientError):
                await _call(llm, 2)
            await asyncio.sleep(0.01)
        return 1.0

    async with _runner(tmp_path, agent, timeout_s=1.0) as (runner, _):
        (rollout,) = await _run(runner)
        assert (rollout.status, rollout.reason) == ("agent_failure", "deadline")
        (trajectory,), metrics = to_trajectories(runner.store, [rollout], policy_version=3)
        assert (trajectory.reward, trajectory.is_failed) == (0.0, True)
        early, late = trajectory.transitions
        assert len(early.response_token_ids) == 2
        assert late.finish_reason == "length" and 10 < len(late.response_token_ids) < 100
        assert set(late.behavior_logprobs) == {-1.0}
        assert metrics.get("rollout/dropped_call_cancelled", 0.0) == 0.0


async def test_time_in_the_queue_is_not_on_the_deadline(tmp_path: Path) -> None:
    """The second call waits for as long as the first one runs."""

    async def agent(task: Task, llm: LLM) -> float:
        return float(await _call(llm, 8))  # 0.8 s

    async with _runner(tmp_path, agent, timeout_s=1.2) as (runner, engine):
        engine.slots, engine.step_s = asyncio.Semaphore(1), 0.1
        rollouts = await _run(runner, 2)
        assert [(r.status, r.reward) for r in rollouts] == [("scored", 8.0)] * 2


async def test_rollout_that_only_waits_is_infrastructure(tmp_path: Path) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        await _call(llm, 2)
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                await _call(llm, 3)

    async with _runner(tmp_path, agent, timeout_s=1.0, call_timeout_s=0.3) as (runner, engine):
        running = asyncio.create_task(_run(runner))
        async with asyncio.timeout(10):
            while len(engine.requests) < 2:
                await asyncio.sleep(0.005)
        engine.stands_still.set()
        (rollout,) = await running
        assert rollout.status == "infrastructure_failure" and rollout.reward is None


async def test_deadline_without_the_late_call_is_infrastructure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_rollouts, "EXPIRE_S", 0.1)

    async def agent(task: Task, llm: LLM) -> float:
        return float(await _call(llm, 1500))

    async with _runner(tmp_path, agent, timeout_s=1.0) as (runner, engine):
        running = asyncio.create_task(_run(runner))
        await asyncio.sleep(0.5)
        engine.stands_still.set()
        (rollout,) = await running
        assert (rollout.status, rollout.reason) == ("infrastructure_failure", "call_timeout")
