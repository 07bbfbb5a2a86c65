"""Workers that fall silent: they are replaced, and innocent tasks keep their rewards."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from arena import SERVE
from log_events import records
from waiting import until

from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.rollouts.workers.pool import WorkerPool, open_workers
from lightning_jax.testing.service import run_service
from lightning_jax.types import Task

AGENTS = Path(__file__).with_name("silent_agents.py")
LEASE_S = 2.0
HONEST = [{"id": f"honest-{n}", "kind": "honest"} for n in range(3)]


@asynccontextmanager
async def _runner(
    path: Path, model: LoadedModel, engine: SlotPrograms, **settings: Any
) -> AsyncIterator[Runner]:
    """Yield a runner with two workers of short leases."""
    agent = AgentConfig(f"{AGENTS}:run", lease_s=LEASE_S)
    values = {"retry_delay_s": 0.0, "concurrency": 8, "max_infrastructure_failures": 1.0}
    config = RolloutConfig(**values | settings)
    async with (
        run_service(path, model, engine, SERVE) as service,
        open_workers(agent, 2, service.gateway, config) as workers,
    ):
        await until(lambda: workers.num_workers == 2)
        yield Runner(workers, service.gateway, config, seed=0)


@pytest.mark.parametrize("timeout_s", [30.0, 0.75 * LEASE_S])
async def test_regular_expression_that_holds_the_interpreter_fails_alone(
    tmp_path: Path,
    model: LoadedModel,
    engine: SlotPrograms,
    caplog: pytest.LogCaptureFixture,
    timeout_s: float,
) -> None:
    tasks: list[Task] = [*HONEST, {"id": "bad", "kind": "regular_expression"}]
    async with _runner(tmp_path, model, engine, timeout_s=timeout_s) as runner:
        rollouts = await run_requests(make_requests(tasks, "train", 0, 2), runner)
        stored = runner.store.rollouts()
    honest = [r for r in rollouts if r.task_id != "bad"]
    assert {(r.status, r.reward) for r in honest} == {("scored", 0.5)}
    assert max(r.attempt for r in honest) <= 2
    bad = [r for r in rollouts if r.task_id == "bad"]
    assert {(r.status, r.reason) for r in bad} == {("agent_failure", "silences_workers")}
    lost = [r for r in stored if r.status == "infrastructure_failure"]
    assert lost and {r.reason for r in lost} == {"worker_silent"}
    assert {r.worker for r in stored} == {"local-0", "local-1"}
    ended = records(caplog, "worker_silent")
    assert 2 <= len(ended) <= 4
    assert {record.worker for record in ended} <= {"local-0", "local-1"}


async def test_stopped_worker_is_replaced_within_two_leases(
    tmp_path: Path, model: LoadedModel, engine: SlotPrograms, caplog: pytest.LogCaptureFixture
) -> None:
    tasks: list[Task] = [*HONEST, {"id": "stops", "kind": "stops", "notes": str(tmp_path)}]
    async with _runner(tmp_path, model, engine) as runner:
        running = asyncio.create_task(run_requests(make_requests(tasks, "train", 0, 1), runner))
        await until((tmp_path / "stopped").exists)
        await until(lambda: records(caplog, "worker_silent"), 2 * LEASE_S)
        rollouts = await running
        workers = runner.agent
        assert isinstance(workers, WorkerPool)
        await until(lambda: workers.num_workers == 2)
    assert {(r.status, r.reward) for r in rollouts} == {("scored", 0.5)}
    (silent,) = records(caplog, "worker_silent")
    lost = {r.task_id for r in rollouts if r.attempt == 2}
    assert "stops" in lost and len(lost) == silent.number
