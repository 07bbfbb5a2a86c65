"""Tests of the time that a rollout loses to waiting."""

import asyncio
import threading
import time

import pytest

from lightning_jax.engine.response import TimeLimit
from lightning_jax.gateway.calls.offload import INLINE_BYTES, NUM_THREADS, Offload
from lightning_jax.gateway.sessions import waits as waits_module
from lightning_jax.gateway.sessions.waits import Lost, Waits, counted_for, waiting_for_store


async def test_time_is_lost_while_all_responses_wait() -> None:
    now_s = 0.0
    waits = Waits(lambda: now_s)
    first, second, third = TimeLimit(), TimeLimit(), TimeLimit()
    task = asyncio.ensure_future(asyncio.sleep(0))
    now_s = 5.0  # the agent works without a call
    waits.add(first, second)
    now_s = 7.0
    assert waits.lost == Lost(2.0, 2.0)
    waits.begin(first, task)
    assert waits.lost == Lost(2.0, 0.0)
    now_s = 11.0  # one decodes, so an agent cannot stop the clock by asking for more
    assert waits.lost == Lost(2.0, 0.0)
    waits.remove(first)
    now_s = 12.0
    waits.add(third)
    now_s = 14.0
    assert waits.lost == Lost(5.0, 3.0)
    waits.begin(second, task)
    assert waits.end_decoding() == {task}
    assert second.is_over(now_s)
    assert not first.is_over(now_s) and not third.is_over(now_s)
    waits.remove(second, third, third)
    now_s = 99.0
    assert waits.lost == Lost(5.0, 0.0) and waits.end_decoding() == set()
    await task


async def test_other_work_is_lost_until_it_begins() -> None:
    now_s = 0.0
    waits = Waits(lambda: now_s)
    waits.add("parse")
    waits.add(TimeLimit())
    now_s = 3.0
    waits.begin("parse")  # what the agent sent is read, in the agent's time
    now_s = 10.0
    assert waits.lost == Lost(3.0, 3.0)
    waits.remove("parse")
    waits.begin("parse")  # too late: its request was cancelled
    now_s = 12.0
    assert waits.lost == Lost(5.0, 5.0)


async def test_wait_for_a_thread_is_lost_and_work_in_it_is_not() -> None:
    waits, offload = Waits(time.monotonic), Offload()
    release = threading.Event()
    size = INLINE_BYTES + 1
    held = [asyncio.create_task(offload.run(size, release.wait)) for _ in range(NUM_THREADS)]
    await asyncio.sleep(0.02)
    with counted_for(waits):
        waiting = asyncio.create_task(offload.run(size, time.sleep, 0.3))
    await asyncio.sleep(0.2)
    assert 0.15 < waits.lost.total_s < 0.3
    release.set()
    for task in (*held, waiting):
        await task
    lost_s = waits.lost.total_s
    await asyncio.sleep(0.05)
    assert 0.15 < lost_s == waits.lost.total_s < 0.4
    offload.close()


async def test_slow_store_is_lost_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_module, "PATIENCE_S", 0.1)
    waits = Waits(time.monotonic)
    with counted_for(waits):
        with waiting_for_store():
            pass
        await asyncio.sleep(0.2)
        assert waits.lost == Lost()  # an agent cannot stop the clock with many quick posts
        with waiting_for_store():
            await asyncio.sleep(0.4)
    assert 0.2 < waits.lost.total_s < 0.4
    with waiting_for_store():  # outside of rollouts
        await asyncio.sleep(0.2)
    assert waits.lost.total_s < 0.4
