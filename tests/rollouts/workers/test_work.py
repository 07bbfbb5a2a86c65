"""Tests of a worker's side of the lease protocol, and of the limits on what it reports."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from coded import raises_coded
from log_events import records

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.calls.remote import RemoteEngine, remote_role, remote_routing
from lightning_jax.gateway.sessions.work_messages import Report
from lightning_jax.rollouts.agents.outcome import DROPPED_METRICS
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.rollouts.workers import pool
from lightning_jax.rollouts.workers.pool import WorkerPool
from lightning_jax.rollouts.workers.work import outcome_of_report
from lightning_jax.rollouts.workers.worker import Refused, Server, run_worker
from lightning_jax.traces.store import TemporaryStore
from lightning_jax.types import LLM, Task

TASKS = [{"id": f"t{n}"} for n in range(2)]


@asynccontextmanager
async def _runner(lease_s: float, **settings: Any) -> AsyncIterator[tuple[Runner, Server]]:
    """Yield a runner whose rollouts wait for workers, and its server. No model is loaded."""
    routing = remote_routing({}, remote_role("http://127.0.0.1:9/v1"))
    with contextlib.closing(TemporaryStore()) as store:
        engine = RemoteEngine("none", ServeConfig(api_key="k"))
        async with (
            Gateway(engine, store, routing=routing) as gateway,
            gateway.work.opened({}, lease_s) as queue,
        ):
            values: dict[str, Any] = {"retry_delay_s": 0.0}
            config = RolloutConfig(**values | settings)
            yield (
                Runner(WorkerPool(queue, "start one"), gateway, config, seed=0),
                Server(gateway.url, "k"),
            )


@asynccontextmanager
async def _worker(agent: Any, server: Server) -> AsyncIterator[None]:
    """Run a worker of this process while this context is open."""
    working = asyncio.create_task(run_worker(agent, {}, server, concurrency=2, name="w"))
    try:
        yield
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def test_short_leases_are_renewed_from_the_first_one_on() -> None:
    async def agent(task: Task, llm: LLM) -> float:
        await asyncio.sleep(1.5)
        return 1.0

    async with _runner(0.5, max_attempts=1) as (runner, server), _worker(agent, server):
        rollouts = await run_requests(make_requests(TASKS, "train", 0, 1), runner)
        assert [(r.status, r.attempt, r.worker) for r in rollouts] == [("scored", 1, "w")] * 2


@pytest.mark.parametrize("answer", [{"lease": "l", "work": {}}, {"lease": None}, {"version": 99}])
async def test_server_of_another_release_is_one_sentence(answer: dict[str, Any]) -> None:
    given_back = []

    async def take(request: web.Request) -> web.Response:
        return web.json_response(answer)

    async def report(request: web.Request) -> web.Response:
        given_back.append((await request.json())["reason"])
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/leases/take", take)
    app.router.add_post("/v1/leases/l/report", report)

    async def agent(task: Task, llm: LLM) -> float:
        return 1.0

    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        with raises_coded(Refused, "other_release", "version"):
            await run_worker(agent, {}, Server(url, "k"), concurrency=1, name="w")
    assert given_back == ["worker_stopped"] * bool(answer.get("lease"))


async def test_rollouts_that_wait_while_no_worker_asks_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "UNASKED_S", 0.1)
    release = asyncio.Event()

    async def agent(task: Task, llm: LLM) -> float:
        await asyncio.to_thread(lambda: None)
        while not release.is_set():
            await asyncio.sleep(0.01)
        return 1.0

    tasks = [{"id": f"t{n}"} for n in range(3)]  # one more than the worker takes
    async with _runner(30.0) as (runner, server), _worker(agent, server):
        running = asyncio.create_task(run_requests(make_requests(tasks, "train", 0, 1), runner))
        async with asyncio.timeout(20):
            while not records(caplog, "no_worker"):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        (record,) = records(caplog, "no_worker")  # once
        assert record.number == 1  # worker, which is busy
        release.set()
        assert {r.status for r in await running} == {"scored"}


@pytest.mark.parametrize(
    "report",
    [
        {"status": "scored", "reward": 11.0},
        {"status": "scored", "reward": -11.0},
        {"status": "agent_failure", "reason": "x", "reward": 11.0},
    ],
)
def test_report_beyond_the_runs_limits_is_a_bad_reward(report: dict[str, Any]) -> None:
    found = outcome_of_report(Report(**report), RolloutConfig(max_abs_reward=10.0))
    assert (found.status, found.reason, found.reward) == ("agent_failure", "bad_reward", None)


def test_metrics_beyond_the_runs_limit_are_left_out_and_counted() -> None:
    metrics = {"a": 1.0, "b": 2.0, "n" * 101: 3.0, "c": 4.0}
    report = Report(status="scored", reward=1.0, metrics=metrics | {DROPPED_METRICS: 5.0})
    found = outcome_of_report(report, RolloutConfig(max_metrics=3))
    assert found.metrics == {"a": 1.0, "b": 2.0, DROPPED_METRICS: 7.0}
    kept = outcome_of_report(report, RolloutConfig(max_metrics=0))
    assert (kept.status, kept.metrics) == ("scored", {DROPPED_METRICS: 9.0})
