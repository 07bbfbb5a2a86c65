"""Stops of an event loop are measured."""

import asyncio
import time

from stalls import loop_stalls


async def test_a_blocking_call_is_a_stall_with_its_line_and_waiting_is_none() -> None:
    async with loop_stalls() as stalls:
        await asyncio.sleep(0.05)
        time.sleep(0.5)
        await asyncio.sleep(0.05)
        assert stalls.longest.seconds > 0.25 and "test_stalls.py" in stalls.longest.line
        stalls.reset()
        await asyncio.sleep(0.5)
    assert stalls.num_beats > 1 and stalls.longest.seconds < 0.25
