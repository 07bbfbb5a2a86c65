"""Tests of leases: work goes to one worker that asks, and counts once, whatever the worker does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from coded import raises_coded
from gateway_bench import Bench
from log_events import records
from waiting import until

from lightning_jax.errors import UserError
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.sessions import leases
from lightning_jax.gateway.sessions.leases import LeaseLost, LeaseQueue
from lightning_jax.gateway.sessions.work_messages import VERSION, Report

AGENT = {"agent.function": "abc"}
SCORED: dict[str, Any] = {"status": "scored", "reward": 0.5, "metrics": {"f1": 1.0}}


@asynccontextmanager
async def _queue(bench: Bench, lease_s: float = 30.0) -> AsyncIterator[LeaseQueue]:
    async with bench.gateway.work.opened(AGENT, lease_s) as queue:
        yield queue


async def _run(queue: LeaseQueue, name: str, alone: bool) -> Report:
    async with queue.worker(alone=alone) as worker:
        return await worker.run(json.dumps({"name": name}))


def _start(queue: LeaseQueue, name: str = "a", *, alone: bool = False) -> asyncio.Task[Report]:
    return asyncio.create_task(_run(queue, name, alone))


async def _take(bench: Bench, worker: str = "w", **changes: Any) -> dict[str, Any]:
    body = {"worker": worker, "agent": AGENT, "version": VERSION} | changes
    status, answer, _ = await bench.post(body, path="/v1/leases/take")
    assert status == 200, answer
    return answer


async def _beat(bench: Bench, *lease_ids: str) -> list[str]:
    status, answer, _ = await bench.post({"leases": lease_ids}, path="/v1/leases/heartbeat")
    assert status == 200
    return list(answer["over"])


async def _report(bench: Bench, lease_id: str, body: dict[str, Any]) -> tuple[int, str]:
    status, answer, _ = await bench.post(body, path=f"/v1/leases/{lease_id}/report")
    return status, answer.get("error", {}).get("code", "")


async def test_report_is_the_outcome_and_counts_once(bench: Bench) -> None:
    async with _queue(bench) as queue:
        running = _start(queue)
        taken = await _take(bench)
        assert taken["work"] == {"name": "a"}
        assert await _beat(bench, taken["lease"]) == []
        assert await _report(bench, taken["lease"], SCORED) == (200, "")
        report = await running
        assert (report.status, report.reward, report.metrics) == ("scored", 0.5, {"f1": 1.0})
        late = SCORED | {"reward": 1.0}
        assert await _report(bench, taken["lease"], late) == (410, "lease_over")
        assert await _beat(bench, taken["lease"]) == [taken["lease"]]
        assert (queue.num_taken, queue.num_lost, queue.num_workers) == (1, 0, 0)


async def test_worker_waits_for_work_and_work_for_a_worker(bench: Bench) -> None:
    async with _queue(bench) as queue:
        asking = [asyncio.create_task(_take(bench, name)) for name in ("w", "v")]
        await until(lambda: queue.num_workers == 2)
        first = _start(queue, "a")
        later = [_start(queue, name) for name in "bcd"]
        taken = [await task for task in asking] + [await _take(bench, "w") for _ in range(2)]
        assert {answer["work"]["name"] for answer in taken} == set("abcd")
        for answer in taken:
            await _report(bench, answer["lease"], SCORED)
        await asyncio.gather(first, *later)


async def test_workers_with_least_to_do_come_first(bench: Bench) -> None:
    async with _queue(bench) as queue:
        works = [_start(queue, name) for name in "ab"]
        held = [await _take(bench, "busy") for _ in works]
        for name in ("busy", "idle"):
            works.append(asyncio.create_task(_take(bench, name)))  # type: ignore[arg-type]
        await until(lambda: queue.num_workers == 2)
        works.append(_start(queue, "c"))
        idle = works[-2]
        assert (await idle)["work"] == {"name": "c"}  # type: ignore[index]
        for answer in (*held, await idle):
            await _report(bench, answer["lease"], SCORED)  # type: ignore[index]
        works.pop(2).cancel()
        await asyncio.gather(*works)


async def test_silent_worker_loses_its_lease(bench: Bench) -> None:
    async with _queue(bench, lease_s=0.4) as queue:
        silent, living = _start(queue, "a"), _start(queue, "b")
        dead, alive = await _take(bench, "dead"), await _take(bench, "alive")
        with raises_coded(LeaseLost, "worker_lost", "dead"):
            while True:  # a worker that sends heartbeats keeps its lease all the while
                done, _ = await asyncio.wait({silent}, timeout=0.05)
                assert await _beat(bench, alive["lease"]) == []
                for task in done:
                    task.result()
        assert await _report(bench, dead["lease"], SCORED) == (410, "lease_over")
        assert await _report(bench, alive["lease"], SCORED) == (200, "")
        await living
        assert queue.num_lost == 1


async def test_silent_worker_loses_all_leases_and_is_named_to_its_run(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async with _queue(bench, lease_s=0.4) as queue:
        silence = asyncio.create_task(queue.silence("ours"))
        works = [_start(queue, name) for name in "abc"]
        for worker in ("ours", "ours", "other"):
            await _take(bench, worker)
        asking = asyncio.create_task(_take(bench, "ours"))
        await asyncio.wait({silence}, timeout=5)
        assert silence.done() and (await asking)["lease"] is None
        lost = [work.exception() for work in (await asyncio.wait(works, timeout=5))[0]]
        assert all(isinstance(error, LeaseLost) and error.is_silent for error in lost)
        reasons = sorted((error.key, error.reason) for error in lost)  # type: ignore[union-attr]
        assert reasons == [
            ("other", "worker_lost"),
            ("ours", "worker_silent"),
            ("ours", "worker_silent"),
        ]
    named = {(record.worker, record.number) for record in records(caplog, "worker_silent")}
    assert named == {("ours", 2), ("other", 1)}


async def test_work_that_must_be_alone_shares_no_worker(bench: Bench) -> None:
    async with _queue(bench) as queue:
        first = _start(queue, "a")
        held = await _take(bench, "w")
        alone, later = _start(queue, "alone", alone=True), _start(queue, "b")
        asking = asyncio.create_task(_take(bench, "w"))
        await asyncio.wait({asking}, timeout=0.1)
        assert not asking.done()  # it waits until the worker has nothing else
        assert (await _take(bench, "v"))["work"] == {"name": "alone"}  # free at once
        assert (await asking)["work"] == {"name": "b"}
        await _report(bench, held["lease"], SCORED)
        again, waits = _start(queue, "again", alone=True), _start(queue, "c")
        next_w = asyncio.create_task(_take(bench, "w"))
        await asyncio.wait({next_w}, timeout=0.1)
        assert not next_w.done()
        await _report(bench, (await asyncio.shield(asking))["lease"], SCORED)
        assert (await next_w)["work"] == {"name": "again"}
        more = asyncio.create_task(_take(bench, "w"))
        await asyncio.wait({more}, timeout=0.1)
        assert not more.done()
        await _report(bench, (await next_w)["lease"], SCORED)
        assert (await more)["work"] == {"name": "c"}
        await first
        for work in (alone, later, again, waits):
            work.cancel()


async def test_first_answer_has_the_length_and_the_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "POLL_S", 0.05)
    async with _queue(bench, lease_s=1.5):
        answer = await _take(bench)
        assert answer == {"version": VERSION, "lease_s": 1.5, "lease": None, "work": None}


@pytest.mark.parametrize("version", [None, 0, VERSION + 1])
async def test_worker_of_another_release_is_refused(bench: Bench, version: int | None) -> None:
    async with _queue(bench):
        body = {"worker": "w", "agent": {}} | ({} if version is None else {"version": version})
        status, answer, _ = await bench.post(body, path="/v1/leases/take")
        assert (status, answer["error"]["code"]) == (409, "other_release")


async def test_name_of_a_worker_forges_no_lines_of_the_log(bench: Bench) -> None:
    async with _queue(bench):
        for name in ("a\nb", "\x1b[2J", "\x9b", "x" * 201, ""):
            body = {"worker": name, "agent": AGENT, "version": VERSION}
            status, answer, _ = await bench.post(body, path="/v1/leases/take")
            assert (status, answer["error"]["param"]) == (400, "worker")


async def test_broken_machine_gets_little_of_the_work(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    failed = {"status": "agent_failure", "reason": "FileNotFoundError"}

    async def serve(worker: str, report: dict[str, Any], seconds: float) -> None:
        while True:
            if (lease := (await _take(bench, worker))["lease"]) is not None:
                await asyncio.sleep(seconds)
                await _report(bench, lease, report)

    async with _queue(bench) as queue:
        good = [asyncio.create_task(serve("good", SCORED, 0.2)) for _ in range(4)]
        bad = [asyncio.create_task(serve("bad", failed, 0.0)) for _ in range(4)]
        ended = await asyncio.gather(*(_start(queue, str(n)) for n in range(32)))
        for task in (*good, *bad):
            task.cancel()
    num_failed = sum(report.status == "agent_failure" for report in ended)
    assert 5 <= num_failed <= 9  # 28 of 32 otherwise
    (named,) = records(caplog, "worker_fails")
    assert (named.worker, named.reason) == ("bad", "FileNotFoundError")


async def test_cancelled_work_is_withdrawn(bench: Bench) -> None:
    async with _queue(bench) as queue:
        running, waiting = _start(queue, "a"), _start(queue, "b")
        taken = await _take(bench)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await _beat(bench, taken["lease"]) == [taken["lease"]]
        assert await _report(bench, taken["lease"], SCORED) == (410, "lease_over")
        following = _start(queue, "c")
        assert (await _take(bench))["work"] == {"name": "c"}  # not b
        following.cancel()


async def test_worker_that_hangs_up_gets_no_lease(bench: Bench) -> None:
    async with _queue(bench) as queue:
        asking = asyncio.create_task(_take(bench, "gone"))
        await until(lambda: queue.num_workers == 1)
        async with queue.worker() as worker:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await asyncio.sleep(0.1)
            running = asyncio.create_task(worker.run("1"))
            taken = await _take(bench, "next")
            assert taken["work"] == 1
            await _report(bench, taken["lease"], SCORED)
            assert (await running).reward == 0.5
        assert queue.num_workers == queue.num_lost == 0


async def test_worker_asks_again_without_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "POLL_S", 0.05)
    async with _queue(bench) as queue:
        assert (await _take(bench))["lease"] is None
        asking = asyncio.create_task(_take(bench))
        await until(lambda: queue.num_workers == 1)
        async with queue.worker():
            pass  # its rollout could not begin
        assert (await asking)["lease"] is None


async def test_dropped_worker_loses_all_leases_at_once(bench: Bench) -> None:
    async with _queue(bench) as queue:
        running = [_start(queue, name) for name in "abc"]
        for name in ("w", "w", "v"):
            await _take(bench, name)
        queue.drop("w", "ended")
        ended = await asyncio.wait(running, timeout=0.1)
        assert [type(task.exception()) for task in ended[0]] == [LeaseLost] * 2
        for task in ended[1]:
            task.cancel()


async def test_failed_queue_ends_what_waits(bench: Bench) -> None:
    async with _queue(bench) as queue:
        waiting = _start(queue)
        await asyncio.sleep(0)
        queue.fail(UserError("the agent cannot be loaded", reason="not_loaded"))
        for task in (waiting, _start(queue)):
            with raises_coded(UserError, "not_loaded"):
                await task


async def test_closed_queue_sends_workers_away(bench: Bench) -> None:
    async with _queue(bench) as queue:
        asking = asyncio.create_task(_take(bench))
        await until(lambda: queue.num_workers == 1)
    assert (await asking)["lease"] is None
    status, answer, _ = await bench.post(
        {"worker": "w", "agent": AGENT, "version": VERSION}, path="/v1/leases/take"
    )
    assert (status, answer["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize("agent", [{}, {"agent.function": "xyz"}, AGENT | {"agent.options": "o"}])
async def test_worker_with_another_agent_is_refused(bench: Bench, agent: dict[str, str]) -> None:
    async with _queue(bench):
        body = {"worker": "w", "agent": agent, "version": VERSION}
        status, answer, _ = await bench.post(body, path="/v1/leases/take")
        assert (status, answer["error"]["code"]) == (409, "wrong_agent")
        named = "agent.options" if "agent.options" in agent else "agent.function"
        assert named in answer["error"]["message"]


@pytest.mark.parametrize("path", ["take", "heartbeat", "x/report"])
async def test_routes_need_the_servers_key(bench: Bench, path: str) -> None:
    rollout = bench.rollout()
    for key in ("", "wrong", rollout.api_key):
        status, answer, _ = await bench.post({}, path=f"/v1/leases/{path}", key=key)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    status, answer, _ = await bench.post({}, path=f"/v1/leases/{path}")
    assert (status, answer["error"]["code"]) == (404, "no_queue")
    async with _queue(bench):
        status, answer, _ = await bench.post(b"{", path=f"/v1/leases/{path}")
        assert (status, answer["error"]["code"]) == (400, "invalid_value")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "status"),
        ({"status": "good", "reward": 1.0}, "status"),
        ({"status": "scored"}, "reward"),
        ({"status": "scored", "reward": "1"}, "reward"),
        ({"status": "scored", "reward": float("nan")}, "reward"),
        ({"status": "agent_failure", "reward": 1.0}, "reason"),
        ({"status": "agent_failure", "reason": ""}, "reason"),
        ({"status": "agent_failure", "reason": "x", "metrics": ["n"]}, "metrics"),
        ({"status": "agent_failure", "reason": "x", "kind": "other"}, "kind"),
    ],
)
async def test_report_without_meaning_is_refused(
    bench: Bench, body: dict[str, Any], param: str
) -> None:
    async with _queue(bench) as queue:
        running = _start(queue)
        taken = await _take(bench)
        path = f"/v1/leases/{taken['lease']}/report"
        status, answer, _ = await bench.post(body, path=path)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert await _report(bench, taken["lease"], SCORED) == (200, "")
        assert (await running).status == "scored"


async def test_lease_of_a_program_outside_ends_by_its_report_or_its_silence() -> None:
    queue = LeaseQueue()
    running = asyncio.create_task(queue.lease_outside("r", lambda: 0.0, 60.0))
    await asyncio.sleep(0)
    assert list(queue.beat(["r"])) == ["r"]  # no worker has it
    queue.report("r", Report(status="scored", reward=0.5))
    assert (await running).reward == 0.5 and not queue.is_open("r")
    with raises_coded(ApiError, "lease_over", "r"):
        queue.report("r", Report(status="scored", reward=1.0))
    expired = await queue.lease_outside("s", lambda: 1.0, 0.5)
    assert (expired.kind, expired.status, expired.reason) == (
        *("no_reward", "infrastructure_failure", "expired"),
    )
    assert (queue.num_taken, queue.num_lost, queue.num_workers) == (0, 0, 0)
