"""Tests of workers: they run the agent as this process does, and their death costs an attempt."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from coded import raises_coded
from log_events import events, records
from test_runner import SERVE, TASKS, TOY, _model_and_engine, _runner

from lightning_jax.errors import UserError
from lightning_jax.gateway.sessions.work_messages import Report
from lightning_jax.rollouts.agents.functions import load_agent
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.rollouts.workers import pool, worker
from lightning_jax.rollouts.workers.pool import (
    OtherMachines,
    StartedWorker,
    WorkerPool,
    open_workers,
)
from lightning_jax.rollouts.workers.work import (
    fingerprint,
    first_unsendable,
    outcome_of_report,
    unsendable,
)
from lightning_jax.rollouts.workers.worker import Refused, Server, run_worker
from lightning_jax.settings import ConfigError
from lightning_jax.testing.service import run_service
from lightning_jax.traces import attributes
from lightning_jax.traces.store import STOP
from lightning_jax.types import Rollout, Task

pytestmark = pytest.mark.slow

AGENT = '''
"""Agents that say in which process they run."""

import asyncio
import os
import pathlib
import time

import openai


async def run(task, llm, *, bonus=0.0):
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        reply = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
        )
    return {"reward": len(reply.choices[0].message.content) + bonus, "pid": os.getpid()}


async def hang(task, llm):
    """Note the process, and wait in the first attempt only."""
    reward = await run(task, llm)
    note = pathlib.Path(task["notes"]) / f"{task['id']}-{os.getpid()}"
    if not list(note.parent.glob(f"{task['id']}-*")):
        note.write_text(llm.base_url)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            note.rename(note.with_suffix(".cancelled"))
            raise
    return reward


def hang_for_ever(task, llm):
    (pathlib.Path(task["notes"]) / "began").write_text(str(os.getpid()))
    time.sleep(60)


async def fall(task, llm):
    os._exit(3)
'''


@pytest.fixture
def agent_file(tmp_path: Path) -> Path:
    path = tmp_path / "own_agent.py"
    path.write_text(AGENT)
    return path


@asynccontextmanager
async def _local(
    tmp_path: Path, agent: AgentConfig, number: int = 1, **settings: Any
) -> AsyncIterator[Runner]:
    """Yield a runner with local workers over the tiny model."""
    model, engine = _model_and_engine()
    config = RolloutConfig(**{"retry_delay_s": 0.0, "concurrency": 4} | settings)
    async with (
        run_service(tmp_path, model, engine, SERVE) as service,
        open_workers(agent, number, service.gateway, config) as found,
    ):
        yield Runner(found, service.gateway, config, seed=0)


def _ids(runner: Runner, rollout: Rollout) -> list[Any]:
    spans = runner.store.spans(rollout.rollout_id)
    return [span.attributes.get(attributes.RESPONSE_TOKEN_IDS) for span in spans]


async def _until(is_true: Any) -> Any:
    async with asyncio.timeout(60):
        while not (found := is_true()):
            await asyncio.sleep(0.02)
    return found


async def test_workers_give_the_same_rollouts_as_this_process(
    tmp_path: Path, agent_file: Path
) -> None:
    requests = make_requests(TASKS, "train", 0, 2)
    (tmp_path / "here").mkdir()
    options = {"bonus": 0.25}
    found = {}
    config = AgentConfig(f"{agent_file}:run", options=options)
    async with _local(tmp_path, config, 2) as runner:
        rollouts = await run_requests(requests, runner)
        assert {r.metrics["pid"] for r in rollouts}.isdisjoint({os.getpid()})
        assert len({r.metrics["pid"] for r in rollouts}) == 2
        found["workers"] = [(r.reward, r.status, _ids(runner, r)) for r in rollouts]
        for rollout in rollouts:
            root, call = runner.store.spans(rollout.rollout_id)
            assert call.parent_span_id == root.span_id
    async with _runner(tmp_path / "here", "run") as runner:
        runner = replace(runner, agent=load_agent(f"{agent_file}:run", options))
        rollouts = await run_requests(requests, runner)
        found["here"] = [(r.reward, r.status, _ids(runner, r)) for r in rollouts]
    assert found["workers"] == found["here"]


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        ("posts_reward", "scored", None),
        ("traced", "scored", None),
        ("plain", "scored", None),
        ("quiet", "agent_failure", "no_reward"),
        ("odd", "agent_failure", "bad_reward"),
        ("broken", "agent_failure", "KeyError"),
        ("cut_off", "infrastructure_failure", "ConnectionRefusedError"),
        ("slow", "agent_failure", "deadline"),
        ("swallows_its_end", "agent_failure", "deadline"),
        ("leaves", "agent_failure", "SystemExit"),
        ("cancels_itself", "agent_failure", "CancelledError"),
    ],
)
async def test_outcomes_have_the_same_words(
    tmp_path: Path, function: str, status: str, reason: str | None
) -> None:
    requests = make_requests(TASKS[:1], "train", 0, 1)
    settings = {"timeout_s": 2.0, "max_attempts": 1, "max_infrastructure_failures": 1.0}
    found = []
    for where in ("here", "worker"):
        (tmp_path / where).mkdir()
        async with _runner(tmp_path / where, function, **settings) as runner:
            config = AgentConfig(f"{TOY}:{function}")
            async with _joined(runner, config, f"{TOY}:{function}") as joined:
                runner = joined if where == "worker" else runner
                (rollout,) = await run_requests(requests, runner)
                assert rollout.worker == (None if where == "here" else "w")
                rollout = replace(rollout, worker=None)
                found.append((rollout, len(runner.store.spans(rollout.rollout_id))))
    (here, num_spans), (there, _) = found
    assert (there.status, there.reason) == (status, reason)
    assert found == [(here, num_spans)] * 2


@asynccontextmanager
async def _joined(
    runner: Runner, config: AgentConfig, reference: str, lease_s: float = 30.0
) -> AsyncIterator[Runner]:
    """Yield the runner with a worker of this process that has joined over HTTP."""
    server = Server(runner.gateway.url, runner.gateway.api_key)
    async with runner.gateway.work.opened(fingerprint(config), lease_s) as queue:
        agent = load_agent(reference, config.options)
        working = run_worker(agent, fingerprint(config), server, concurrency=2, name="w")
        task = asyncio.create_task(working)
        try:
            yield replace(runner, agent=WorkerPool(queue))
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _hanging(tmp_path: Path) -> list[Task]:
    return [{**task, "notes": str(tmp_path)} for task in TASKS]


def _notes(tmp_path: Path) -> dict[str, int]:
    """Return the process that first ran each task."""
    names = [path.name.split("-") for path in tmp_path.glob("t*-*")]
    return {task: int(pid.partition(".")[0]) for task, pid in names}


async def test_rollouts_of_a_killed_worker_run_elsewhere_and_count_once(
    tmp_path: Path, agent_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AgentConfig(f"{agent_file}:hang")
    async with _local(tmp_path, config, 2) as runner:
        requests = make_requests(_hanging(tmp_path), "train", 0, 1)
        running = asyncio.create_task(run_requests(requests, runner))
        killed = (await _until(lambda: len(_notes(tmp_path)) == 3 and _notes(tmp_path)))["t0"]
        lost = {task for task, pid in _notes(tmp_path).items() if pid == killed}
        os.kill(killed, signal.SIGKILL)
        for path in tmp_path.glob("t*-*"):  # end the others
            if int(path.name.split("-")[1]) != killed:
                os.kill(int(path.name.split("-")[1]), signal.SIGKILL)
                break
        rollouts = await running
        # One may have gone to the second worker before its end was noticed.
        assert {(r.status, min(r.attempt, 2)) for r in rollouts} == {("scored", 2)}
        stored = runner.store.rollouts()
        assert lost and len(stored) == sum(r.attempt for r in rollouts)
        reasons = {r.reason for r in stored if r.status != "scored"}
        assert reasons == {"worker_lost"}
        assert {r.metrics["pid"] for r in rollouts}.isdisjoint(_notes(tmp_path).values())
    assert len(records(caplog, "worker_ended")) == 2


async def test_deadline_cancels_the_agent_of_a_worker(tmp_path: Path, agent_file: Path) -> None:
    config = AgentConfig(f"{agent_file}:hang", lease_s=1.0)
    async with _local(tmp_path, config, timeout_s=1.0) as runner:
        requests = make_requests(_hanging(tmp_path)[:1], "train", 0, 1)
        (rollout,) = await run_requests(requests, runner)
        assert (rollout.status, rollout.reason) == ("agent_failure", "deadline")
        await _until(lambda: list(tmp_path.glob("*.cancelled")))


async def test_stopped_run_ends_its_workers(tmp_path: Path, agent_file: Path) -> None:
    config = AgentConfig(f"{agent_file}:hang_for_ever")
    async with _local(tmp_path, config) as runner:
        requests = make_requests(_hanging(tmp_path)[:1], "train", 0, 1)
        running = asyncio.create_task(run_requests(requests, runner))
        began = tmp_path / "began"
        pid = int(await _until(lambda: began.exists() and began.read_text()))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [r.reason for r in runner.store.rollouts()] == [STOP]
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


async def test_agent_that_cannot_be_loaded_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_package\n\nasync def run(task, llm): ...\n")
    async with _local(tmp_path, AgentConfig(f"{tmp_path}/bad.py:run")) as runner:
        with raises_coded(ConfigError, "not_loaded", f"{tmp_path}/bad.py"):
            await run_requests(make_requests(TASKS, "train", 0, 1), runner)


async def test_worker_that_keeps_dying_ends_the_run(
    tmp_path: Path, agent_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_DELAY_S", 0.0)
    config = AgentConfig(f"{agent_file}:fall")
    async with _local(tmp_path, config, max_attempts=99) as runner:
        with raises_coded(UserError, "worker_ended", "local-0"):
            await run_requests(make_requests(TASKS, "train", 0, 1), runner)


async def test_worker_elsewhere_that_keeps_ending_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_DELAY_S", 0.0)
    starts = list[tuple[int, str]]()

    @asynccontextmanager
    async def start(index: int, settings: dict[str, Any]) -> AsyncIterator[StartedWorker]:
        starts.append((index, settings["url"]))
        ended = asyncio.create_task(asyncio.sleep(0, ("was lost", None)))
        yield StartedWorker(ended, lambda: None)

    async with _runner(tmp_path, "measured") as runner:
        gateway, others = runner.gateway, OtherMachines(2, start)
        agent = AgentConfig(f"{TOY}:measured")
        async with open_workers(agent, 0, gateway, RolloutConfig(), others) as opened:
            with raises_coded(UserError, "worker_ended"):
                await run_requests(
                    make_requests(TASKS, "train", 0, 1), replace(runner, agent=opened)
                )
    assert set(starts) == {(0, gateway.url), (1, gateway.url)} and len(starts) <= 2 * pool.MAX_QUICK


async def test_worker_that_stops_gives_its_rollouts_back(tmp_path: Path) -> None:
    async with _runner(tmp_path, "slow", max_attempts=2, timeout_s=30.0) as runner:
        queue = runner.gateway.work
        runner = replace(runner, agent=WorkerPool(queue))
        server = Server(runner.gateway.url, runner.gateway.api_key)

        def start(function: str) -> asyncio.Task[None]:
            agent = load_agent(f"{TOY}:{function}")
            return asyncio.create_task(run_worker(agent, {}, server, concurrency=1, name=function))

        async with queue.opened({}, 30.0):
            stopping = start("slow")
            requests = make_requests(TASKS[:1], "train", 0, 1)
            running = asyncio.create_task(run_requests(requests, runner))
            await _until(lambda: queue.num_taken == 1)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            other = start("measured")
            (rollout,) = await running
            assert (rollout.status, rollout.attempt) == ("scored", 2)
            assert runner.store.rollouts()[0].reason == "worker_stopped"
            other.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await other


async def test_worker_that_comes_back_late_is_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "beat_s", lambda lease_s: 30.0)  # no heartbeat in this test
    caplog.set_level("INFO", "lightning_jax")
    async with _runner(tmp_path, "slow", max_attempts=1, max_infrastructure_failures=1.0) as runner:
        path = tmp_path / "late.py"
        path.write_text(
            "import asyncio\n\nasync def run(task, llm):\n    await asyncio.sleep(1)\n    return 1"
        )
        async with _joined(runner, AgentConfig(f"{path}:run"), f"{path}:run", 0.3) as joined:
            (rollout,) = await run_requests(make_requests(TASKS[:1], "train", 0, 1), joined)
            assert (rollout.status, rollout.reason) == ("infrastructure_failure", "worker_lost")
            await _until(lambda: "lease_refused" in events(caplog))
            assert joined.store.rollout(rollout.rollout_id) == rollout


async def test_metrics_without_a_value_pass_a_worker(tmp_path: Path) -> None:
    async with (
        _runner(tmp_path, "without_values") as runner,
        _joined(runner, AgentConfig(f"{TOY}:without_values"), f"{TOY}:without_values") as joined,
    ):
        rollouts = [
            (await run_requests(make_requests(TASKS[:1], "train", step, 1), one))[0]
            for step, one in enumerate((runner, joined))
        ]
    assert [(r.status, r.reward, len(r.metrics)) for r in rollouts] == [("scored", 0.5, 4)] * 2
    assert rollouts[0].metrics == rollouts[1].metrics


def test_metrics_that_another_worker_reports_are_kept_or_counted() -> None:
    metrics = {"f1": None, "em": 0.5, "note": "well done"}
    report = Report(status="scored", reward=0.5, metrics=metrics)
    assert outcome_of_report(report, RolloutConfig()).metrics == {
        "em": 0.5,
        "dropped_metrics/null/f1": 1.0,
        "dropped_metrics/wrong_type/note": 1.0,
    }


async def test_worker_without_a_tasks_path_lets_others_try(tmp_path: Path) -> None:
    (tmp_path / "db").touch()
    task = {**TASKS[0], "db": str(tmp_path / "db")}
    async with (
        _runner(tmp_path, "measured", max_attempts=1, max_infrastructure_failures=1.0) as runner,
        _joined(runner, AgentConfig(f"{TOY}:measured"), f"{TOY}:measured") as joined,
    ):
        (rollout,) = await run_requests(make_requests([task], "train", 0, 1), joined)
        assert rollout.status == "scored"
        (tmp_path / "db").rename(tmp_path / "moved")

        # The run still sees it; here both are one machine.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "existing_paths", lambda task: {"db": task["db"]})
            (rollout,) = await run_requests(make_requests([task], "train", 1, 1), joined)
        assert (rollout.status, rollout.reason) == ("infrastructure_failure", "path_not_found")
        assert str(tmp_path / "db") in (rollout.detail or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"key": "wrong"}, "invalid_api_key"), ({"agent": {"agent.function": "x"}}, "wrong_agent")],
)
async def test_refused_worker_ends_with_a_sentence(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    async with _runner(tmp_path, "measured") as runner:
        server = Server(runner.gateway.url, changes.get("key", runner.gateway.api_key))
        agent = load_agent(f"{TOY}:measured")
        async with runner.gateway.work.opened({}, 30.0):
            with raises_coded(Refused, reason):
                await run_worker(agent, changes.get("agent", {}), server, concurrency=1, name="w")


async def test_worker_waits_for_a_server_that_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, engine = _model_and_engine()
    agent, working = load_agent(f"{TOY}:measured"), None
    serve = replace(SERVE, api_key="k")
    for step in range(2):
        (tmp_path / str(step)).mkdir()
        async with (
            run_service(tmp_path / str(step), model, engine, serve) as service,
            service.gateway.work.opened({}, 30.0) as queue,
        ):
            serve = replace(serve, port=int(service.gateway.url.rpartition(":")[2]))
            server = Server(service.gateway.url, "k")
            coroutine = run_worker(agent, {}, server, concurrency=1, name="w")
            working = working or asyncio.create_task(coroutine)
            coroutine.close() if step else None
            config = RolloutConfig()
            runner = Runner(WorkerPool(queue), service.gateway, config, seed=0)
            (rollout,) = await run_requests(make_requests(TASKS[:1], "train", 0, 1), runner)
            assert rollout.status == "scored"
    assert working is not None and "server_unreachable" in events(caplog)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_run_without_workers_says_how_to_start_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "UNASKED_S", 0.05)
    async with _local(tmp_path, AgentConfig(f"{TOY}:measured"), 0) as runner:
        running = asyncio.create_task(run_requests(make_requests(TASKS, "train", 0, 1), runner))
        await _until(lambda: "no_worker" in events(caplog))
        await asyncio.sleep(0.1)
        running.cancel()
        (record,) = records(caplog, "no_worker")
        assert f"lightning-jax worker --server {runner.gateway.url}" in record.getMessage()
        assert runner.store.rollouts() == []


@pytest.mark.parametrize("value", [{1, 2}, b"x", Path("a"), object()])
def test_task_without_json_is_named_with_its_field(value: object) -> None:
    tasks: list[Task] = [{"id": "good", "q": ["?"]}, {"id": "bad", "fine": 1, "field": value}]
    found = first_unsendable(tasks)
    assert found is not None and found["id"] == "bad"
    error = unsendable(found)
    assert (error.reason, error.key) == ("not_json", "bad")
    assert "'field'" in str(error) and type(value).__name__ in str(error)
    assert first_unsendable(tasks[:1]) is None


def test_fingerprints_compare_contents_and_options(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "agent.py").write_text(AGENT)
        (tmp_path / name / "ask.sh").write_text("#!/bin/sh\necho 1\n")

    def of(name: str, function: str = "run", **settings: Any) -> dict[str, str]:
        return fingerprint(AgentConfig(f"{tmp_path / name}/agent.py:{function}", **settings))

    assert of("one") == of("two") != of("one", "hang")
    assert of("one", options={"bonus": 1}) != of("one")
    assert of("one", python="/usr/bin/python3", env=("A",), workers=3) == of("one")
    (tmp_path / "two/agent.py").write_text(AGENT + "\n")
    assert of("one") != of("two")
    programs = [
        fingerprint(AgentConfig(command=[word, str(tmp_path / name / "agent.py")]))
        for word, name in (("/usr/bin/node", "one"), ("node", "one"), ("node", "two"))
    ]
    assert programs[0] == programs[1] != programs[2]
    one, two = (AgentConfig(command=[f"{tmp_path}/{name}/ask.sh"]) for name in ("one", "two"))
    assert fingerprint(one) == fingerprint(two)
    (tmp_path / "two/ask.sh").write_text("#!/bin/sh\necho 2\n")
    assert fingerprint(one) != fingerprint(two)
