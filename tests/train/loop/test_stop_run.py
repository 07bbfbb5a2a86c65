"""Test that a stopped run keeps its last finished step and the rollouts that were running."""

import asyncio
import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import toy_agent
from toy_runs import toy_config

from lightning_jax.rollouts.agents.functions import AgentFunction
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.results.failures import BrokenAgent
from lightning_jax.traces.listing import Filter, StoreListing
from lightning_jax.traces.store import Store
from lightning_jax.train.config import CheckpointConfig, Config
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.state.checkpoint import Checkpointer
from lightning_jax.train.state.replica import Replica
from lightning_jax.train.watch.metrics import read_metrics
from lightning_jax.types import LLM, Task

TASKS: list[Task] = [{"id": "t0", "question": "a"}, {"id": "t1", "question": "b"}]


def _config(run_dir: Path) -> Config:
    rollout = RolloutConfig(tasks_per_step=2, group_size=2, max_tokens=4)
    once = CheckpointConfig()  # the last step alone
    return toy_config(Path("tiny"), run_dir, num_steps=3, rollout=rollout, checkpoint=once)


async def _stopped_at(moment: threading.Event, config: Config, agent: AgentFunction) -> None:
    running = asyncio.create_task(train(config, TASKS, TASKS, agent=agent))
    assert await asyncio.to_thread(moment.wait, 120)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def _steps(config: Config) -> tuple[list[int], int]:
    """Return the steps of the run's checkpoints, and the number of its rows."""
    run = Path(config.run_dir)
    with contextlib.closing(Checkpointer(run / "checkpoints", config.checkpoint)) as checkpoints:
        return checkpoints.steps, len(read_metrics(run / "metrics.jsonl"))


def _statuses(config: Config) -> list[str]:
    """Return the statuses of the rollouts of step 1 that are listed."""
    with contextlib.closing(StoreListing(Path(config.run_dir) / "store.sqlite")) as listing:
        return [r.status for r in listing.rollouts(Filter(phase="train", step=1), limit=99)]


def test_a_stop_keeps_finished_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, updates, update = _config(tmp_path / "run"), threading.Event(), Replica.update

    def notes(replica: Replica, *arguments: object) -> object:
        updates.set()
        return update(replica, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Replica, "update", notes)
        asyncio.run(_stopped_at(updates, config, toy_agent.run))
    assert _steps(config) == ([1], 1)
    waits = threading.Event()

    async def slow(task: Task, llm: LLM) -> float:
        reward = await toy_agent.run(task, llm)
        if task["id"] == "t1":
            waits.set()
            await asyncio.sleep(60)
        return reward

    asyncio.run(_stopped_at(waits, config, slow))
    assert _steps(config) == ([1], 1)
    with contextlib.closing(Store(tmp_path / "run/store.sqlite")) as store:
        stopped = [r for r in store.rollouts(step=1) if r.status == "stopped"]
        assert stopped and {r.reason for r in stopped} == {"stop"}


def test_a_stop_waits_for_the_checkpoint_of_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(_config(tmp_path / "run"), checkpoint=CheckpointConfig(every=1))
    stopping, saving = threading.Event(), threading.Lock()
    update, save, saved = Replica.update, Replica.save, list[bool]()

    def stopped(replica: Replica, *arguments: object) -> object:
        if replica.step == 1:
            stopping.set()
            time.sleep(0.3)  # until the stop waits for this update
        return update(replica, *arguments)  # type: ignore[arg-type]

    def slow(replica: Replica, positions: dict[str, object]) -> None:
        saved.append(saving.acquire(blocking=False))
        time.sleep(0.3)
        save(replica, positions)
        saving.release()

    monkeypatch.setattr(Replica, "update", stopped)
    monkeypatch.setattr(Replica, "save", slow)
    asyncio.run(_stopped_at(stopping, config, toy_agent.run))
    assert saved == [True, True, True]  # the last finds that step 2 is saved
    assert _steps(config) == ([2], 2)


def test_a_broken_agent_keeps_finished_steps(tmp_path: Path) -> None:
    config, is_broken = _config(tmp_path / "run"), threading.Event()

    async def breaks(task: Task, llm: LLM) -> float:
        if is_broken.is_set():
            raise ValueError
        reward = await toy_agent.run(task, llm)
        calls.append(reward)
        if len(calls) == 4:
            is_broken.set()
        return reward

    calls: list[float] = []
    with pytest.raises(BrokenAgent):
        asyncio.run(train(config, TASKS, TASKS, agent=breaks))
    assert _steps(config) == ([1], 1)
    assert _statuses(config) == ["agent_failure"] * 4
    is_broken.clear()
    asyncio.run(train(replace(config, num_steps=2), TASKS, TASKS, agent=breaks))
    assert _statuses(config) == ["scored"] * 4
