"""Tests of the live page's threads: bounds, shares, and none of asyncio's own."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
import view_records as records
from aiohttp import web
from live_page import Live, live

from lightning_jax.gateway.sessions.open_rollouts import Activity
from lightning_jax.studio.live.lanes import BURST_S, Allowance, Lane


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_work_beyond_the_queue_is_refused() -> None:
    lane, blocked = Lane("test", 1, max_waiting=2), threading.Event()
    running = [asyncio.create_task(lane.run(blocked.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(web.HTTPServiceUnavailable) as caught:
        await lane.run(blocked.wait)
    assert caught.value.headers["Retry-After"] == "1" and lane.num_refused == 1
    admitted = asyncio.create_task(lane.run(blocked.wait, is_admitted=True))
    blocked.set()
    assert all(await asyncio.gather(*running, admitted))
    assert lane.num_pending == 0
    lane.close()


async def test_queue_forgets_work_whose_caller_left() -> None:
    lane, blocked = Lane("test", 1, max_waiting=0), threading.Event()
    leaving = asyncio.create_task(lane.run(blocked.wait))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving})
    assert lane.num_pending == 1  # the thread still works
    blocked.set()
    async with asyncio.timeout(5):
        while lane.num_pending:
            await asyncio.sleep(0.01)
    lane.close()


async def test_lane_takes_no_more_than_its_share() -> None:
    lane = Lane("test", 1, max_waiting=100, share=0.5)
    await lane.run(lambda: burn(BURST_S))  # the burst is free
    started = time.monotonic()
    for _ in range(12):
        await lane.run(lambda: burn(0.1))
    took_s = time.monotonic() - started
    # Each waits for what the one before it took beyond the share; the last one's debt is unpaid.
    assert took_s > 1.5  # 1.2 s without a share
    lane.close()


async def test_closed_lane_does_not_wait_for_its_share() -> None:
    lane = Lane("test", 1, max_waiting=100, share=0.001)
    await lane.run(lambda: burn(BURST_S + 0.05))  # 50 s of waiting
    waiting = asyncio.create_task(lane.run(lambda: None))
    await asyncio.sleep(0.05)
    lane.close()
    async with asyncio.timeout(5):
        await waiting


def test_an_allowance_grows_at_its_rate_up_to_a_burst() -> None:
    now = 0.0
    allowance = Allowance(10.0, 20.0, lambda: now)
    allowance.take(25.0)
    assert allowance.amount() == -5.0
    now = 1.0
    assert allowance.amount() == 5.0
    now = 60.0
    assert allowance.amount() == 20.0


async def test_page_of_a_training_leaves_its_threads_alone(tmp_path: Path) -> None:
    """The training's own threads answer at once, whatever the page is asked."""
    records.make_run(tmp_path)
    async with live(tmp_path, activity=lambda: Activity(1, {}, ())) as page:
        asking = [asyncio.create_task(ask(page, f"/groups?limit={n}")) for n in range(1, 150)]
        asking.append(asyncio.create_task(ask(page, "/search?text=nothing")))
        asking += [asyncio.create_task(ask(page, "/rollouts.jsonl")) for _ in range(10)]
        await asyncio.sleep(0.05)
        names = {thread.name for thread in threading.enumerate()}
        found = await asyncio.gather(*asking)
    assert not any(name.startswith("asyncio_") for name in names)
    assert set(found) == {200, 503}


async def ask(page: Live, path: str) -> int:
    async with page.client.get(page.run + path) as response:
        await response.read()
        return response.status
