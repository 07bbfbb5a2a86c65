"""Tests of deadlines that stand still during a pause."""

import asyncio
import time

import pytest

from lightning_jax.gateway.pauses import Pauses


async def _expires_after(pauses: Pauses, seconds: float) -> float:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with pauses.timeout(seconds):
            await asyncio.sleep(10)
    return time.monotonic() - started


async def test_a_deadline_does_not_count_pauses() -> None:
    pauses = Pauses()
    running = asyncio.create_task(_expires_after(pauses, 0.2))
    await asyncio.sleep(0.1)
    with pauses.paused(), pauses.paused():
        assert pauses.is_active
        inside = asyncio.create_task(_expires_after(pauses, 0.25))
        await asyncio.sleep(0.2)
        assert not running.done()
    with pauses.paused():
        await asyncio.sleep(0.2)
        assert not running.done() and not inside.done()
    assert not pauses.is_active
    assert await running >= 0.6 - 0.05
    assert await inside >= 0.6 - 0.05


async def test_work_in_time_and_without_a_limit_ends_normally() -> None:
    pauses = Pauses()
    async with pauses.timeout(None), pauses.timeout(5.0):
        with pauses.paused():
            await asyncio.sleep(0)
    assert await _expires_after(pauses, 0.01) >= 0.01  # the pause left nothing behind
