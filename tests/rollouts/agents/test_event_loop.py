"""Tests of the agents' event loop: an agent there can neither end nor delay anything else."""

import asyncio
import contextvars
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import openai
import pytest
from log_events import events, records
from served_runs import SERVE, TOY, model_and_engine

from lightning_jax.rollouts.agents import event_loop
from lightning_jax.rollouts.agents.event_loop import PATIENCE, isolate_agent, watched_loop
from lightning_jax.rollouts.agents.functions import Agent, Result, call_foreign, load_agent
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.testing.service import run_service
from lightning_jax.types import LLM, Rollout, Task

TICK_S = 0.02  # of the watchdog
NOBODY = LLM("http://127.0.0.1:1/v1", "key", "policy")


async def rolled_out(path: Path, agent: Agent, number: int = 2, **settings: float) -> list[Rollout]:
    config = RolloutConfig(**settings)  # type: ignore[arg-type]
    requests = make_requests([{"id": "a", "question": "0?"}], "train", 0, number)
    async with (
        run_service(path, *model_and_engine(), SERVE) as service,
        isolate_agent(agent) as agent,
    ):
        runner = Runner(agent, service.gateway, config, seed=0)
        rollouts = await run_requests(requests, runner)
        for rollout in rollouts:
            root, *others = service.store.spans(rollout.rollout_id)
            assert {span.parent_span_id for span in others} <= {root.span_id}
    return rollouts


async def blocks(task: Task, llm: LLM) -> Result:
    """Block in a synchronous client inside a coroutine."""
    return plain(task, llm)


def plain(task: Task, llm: LLM) -> Result:
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": "?"}], max_tokens=2
        )
    return 1.0


async def sleeps(task: Task, llm: LLM) -> Result:
    """Block for longer than the deadline."""
    time.sleep(1.0)
    return 1.0


async def test_an_agent_that_blocks_is_answered(tmp_path: Path) -> None:
    rollouts = await asyncio.wait_for(rolled_out(tmp_path, blocks), 60)
    assert [rollout.status for rollout in rollouts] == ["scored"] * 2, rollouts


async def test_a_deadline_is_kept_while_an_agent_blocks(tmp_path: Path) -> None:
    (rollout,) = await rolled_out(tmp_path, sleeps, 1, timeout_s=0.2)
    assert (rollout.status, rollout.reason) == ("agent_failure", "deadline")


async def test_spans_are_in_the_rollouts_trace(tmp_path: Path) -> None:
    rollouts = await rolled_out(tmp_path, load_agent(f"{TOY}:traced"))
    assert [rollout.status for rollout in rollouts] == ["scored"] * 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("broken", "KeyError"),
        ("slow", "deadline"),
        ("swallows_its_end", "deadline"),
        ("waits_too_long", "TimeoutError"),
        ("leaves", "SystemExit"),
        ("cancels_itself", "CancelledError"),
    ],
)
async def test_faults_are_told_as_anywhere(tmp_path: Path, function: str, reason: str) -> None:
    (rollout,) = await rolled_out(tmp_path, load_agent(f"{TOY}:{function}"), 1, timeout_s=0.3)
    assert (rollout.status, rollout.reason) == ("agent_failure", reason)


async def test_it_sees_the_context_it_was_called_in() -> None:
    name = contextvars.ContextVar("name", default="nobody")

    async def agent(task: Task, llm: LLM) -> Result:
        assert threading.current_thread() is not threading.main_thread()
        return {"reward": 1.0, name.get(): 2.0}

    async with isolate_agent(agent) as run:
        name.set("caller")
        assert await run({}, NOBODY) == {"reward": 1.0, "caller": 2.0}


async def test_a_cancelled_agent_is_waited_for() -> None:
    put_in_order = []

    async def agent(task: Task, llm: LLM) -> Result:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            put_in_order.append(task["id"])

    async with isolate_agent(agent) as run:
        running = asyncio.create_task(run({"id": "a"}, NOBODY))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert put_in_order == ["a"]


async def test_one_that_had_not_begun_is_cancelled_as_well() -> None:
    async with isolate_agent(sleeps) as run:
        first = asyncio.create_task(run({}, NOBODY))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        second = asyncio.create_task(run({}, NOBODY))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(second, 30)
        assert await first == 1.0


async def test_sys_exit_in_a_task_of_an_agent_ends_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def leaves() -> None:
        sys.exit(3)

    async def agent(task: Task, llm: LLM) -> Result:
        left = [asyncio.create_task(leaves())] if task["id"] == "a" else []
        await asyncio.sleep(0.1)
        assert all(isinstance(task.exception(), SystemExit) for task in left)
        return 1.0

    async with isolate_agent(agent) as run:
        results = await asyncio.gather(*(run({"id": name}, NOBODY) for name in "ab"))
    assert results == [1.0, 1.0]
    errors = [record.error for record in records(caplog, "agent_task_exited")]
    assert [(type(error), error.code) for error in errors] == [(SystemExit, 3)] * len(errors)
    assert errors


async def test_each_call_of_to_thread_has_a_thread() -> None:
    barrier = threading.Barrier(48)  # more than asyncio's default pool has

    async def agent(task: Task, llm: LLM) -> Result:
        return float(await asyncio.to_thread(barrier.wait, 30) >= 0)

    async with isolate_agent(agent) as run:
        assert await asyncio.gather(*(run({}, NOBODY) for _ in range(48))) == [1.0] * 48


async def test_at_the_end_nothing_is_waited_for_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "GRACE_S", 0.5)
    let_go = threading.Event()

    async def agent(task: Task, llm: LLM) -> Result:
        return float(await asyncio.to_thread(let_go.wait) if task["polite"] else let_go.wait())

    found: list[list[str]] = []
    for polite in (True, False):
        async with isolate_agent(agent) as run:
            running = asyncio.create_task(run({"polite": polite}, NOBODY))  # type: ignore[arg-type]
            await asyncio.sleep(0.1)
        found.append(events(caplog))
        running.cancel()
    let_go.set()
    await asyncio.wait({running}, timeout=30)
    assert found == [[], ["agent_blocks_exit"]]


async def test_the_line_that_blocks_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with watched_loop(asyncio.get_running_loop(), threading.current_thread(), TICK_S):
        await asyncio.sleep(5 * TICK_S)
        time.sleep(3 * PATIENCE * TICK_S)
        await asyncio.sleep(5 * TICK_S)
    (record,) = caplog.records
    assert record.__dict__["event"] == "agent_blocks_loop"
    where = record.__dict__["where"]
    assert "test_event_loop.py" in where and "time.sleep" in where


async def test_waiting_loop_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with watched_loop(asyncio.get_running_loop(), threading.current_thread(), TICK_S):
        await asyncio.sleep(3 * PATIENCE * TICK_S)
    assert caplog.records == []


async def _at_once(agents: dict[str, Agent], tmp_path: Path) -> None:
    """Run the agents of these names at the same time on one event loop of agents."""

    async def chosen(task: Task, llm: LLM) -> Result:
        return await agents[task["id"]](task, llm)

    async with isolate_agent(chosen) as isolated, asyncio.TaskGroup() as group:
        for name in agents:
            group.create_task(isolated({"id": name}, NOBODY))  # type: ignore[arg-type]


async def test_what_agents_share_is_restored_when_none_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Path] = []
    moved, looked = asyncio.Event(), asyncio.Event()

    async def moves(task: Task, llm: LLM) -> Result:
        os.chdir("/")
        os.umask(0o777)
        moved.set()
        await looked.wait()
        seen.append(Path.cwd())  # not changed while it runs
        return 1.0

    async def ends(task: Task, llm: LLM) -> Result:
        await moved.wait()
        looked.set()
        return 1.0

    before = os.umask(0o22)
    try:
        await _at_once({"moves": moves, "ends": ends}, tmp_path)
        assert os.umask(0o22) == 0o22
    finally:
        os.umask(before)
    assert (seen, Path.cwd()) == ([Path("/")], tmp_path)
    assert [r.changed for r in records(caplog, "shared_state_changed")] == [
        ["working directory", "umask"]
    ]


async def test_agents_do_not_stay_in_a_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Path] = []
    left = asyncio.Event()

    async def leaves(task: Task, llm: LLM) -> Result:
        with tempfile.TemporaryDirectory() as gone:
            os.chdir(gone)
        left.set()
        return 1.0

    async def stays(task: Task, llm: LLM) -> Result:
        await left.wait()
        await asyncio.sleep(0.2)
        seen.append(Path.cwd())
        return 1.0

    await _at_once({"leaves": leaves, "stays": stays}, tmp_path)
    assert seen == [tmp_path]


async def test_functions_that_never_return_take_no_thread_of_a_pool() -> None:
    block = threading.Event()
    try:
        hanging = [asyncio.create_task(call_foreign("it", block.wait)) for _ in range(40)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 10) == 7
        assert await asyncio.wait_for(call_foreign("it", lambda: 8), 10) == 8
    finally:
        block.set()
    assert await asyncio.gather(*hanging) == [True] * 40
