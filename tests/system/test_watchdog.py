"""Test that the agent blocking the event loop is named."""

import asyncio
import threading
import time

import pytest

from lightning_jax.system.watchdog import PATIENCE, watched_loop

TICK_S = 0.02


async def test_the_line_that_blocks_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with watched_loop(asyncio.get_running_loop(), threading.current_thread(), TICK_S):
        await asyncio.sleep(5 * TICK_S)
        time.sleep(3 * PATIENCE * TICK_S)
        await asyncio.sleep(5 * TICK_S)
    (record,) = caplog.records
    assert record.__dict__["event"] == "agent_blocks_loop"
    where = record.__dict__["where"]
    assert "test_watchdog.py" in where and "time.sleep" in where


async def test_a_loop_that_waits_is_no_standstill(caplog: pytest.LogCaptureFixture) -> None:
    with watched_loop(asyncio.get_running_loop(), threading.current_thread(), TICK_S):
        await asyncio.sleep(3 * PATIENCE * TICK_S)
    assert caplog.records == []
