"""Tests of a clock that stands still in pauses, of deadlines on it, and of waits."""

import asyncio
import time

import pytest

from lightning_jax.system.clock import PausableClock, backoff_s


async def _expires_after(clock: PausableClock, seconds: float) -> float:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with clock.timeout(seconds):
            await asyncio.sleep(10)
    return time.monotonic() - started


async def test_a_deadline_does_not_count_pauses() -> None:
    clock = PausableClock()
    running = asyncio.create_task(_expires_after(clock, 0.2))
    await asyncio.sleep(0.1)
    with clock.paused(), clock.paused():
        assert clock.is_active
        inside = asyncio.create_task(_expires_after(clock, 0.25))
        await asyncio.sleep(0.2)
        assert not running.done()
    with clock.paused():
        await asyncio.sleep(0.2)
        assert not running.done() and not inside.done()
    assert not clock.is_active
    assert await running >= 0.6 - 0.05
    assert await inside >= 0.6 - 0.05


async def test_work_in_time_and_without_a_limit_ends_normally() -> None:
    clock = PausableClock()
    async with clock.timeout(None), clock.timeout(5.0):
        with clock.paused():
            await asyncio.sleep(0)
    assert await _expires_after(clock, 0.01) >= 0.01  # the pause left nothing behind


def test_wait_doubles_up_to_its_limit() -> None:
    waits = [backoff_s(number, 0.5, 3.0) for number in (0, 1, 2, 3, 4, 5000)]
    assert waits == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


async def test_clock_counts_only_time_outside_of_pauses() -> None:
    clock, started = PausableClock(), time.monotonic()
    before = clock.now_s()
    with clock.paused():
        await asyncio.sleep(0.2)
        assert clock.now_s() - before < 0.1 + time.monotonic() - started - 0.2
    assert clock.total_s >= 0.2
