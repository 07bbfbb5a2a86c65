"""Stops of an event loop are measured."""

import asyncio
import sys
import threading
import time

import pytest
from stalls import loop_stalls


async def test_blocking_call_is_a_stall_with_its_line() -> None:
    async with loop_stalls() as stalls:
        await asyncio.sleep(0.05)
        time.sleep(0.5)
    assert stalls.longest.seconds > 0.25
    assert "test_stalls.py" in stalls.longest.line


async def test_waiting_loop_has_no_stall() -> None:
    async with loop_stalls() as stalls:
        await asyncio.sleep(0.5)
    assert stalls.num_beats > 1
    assert stalls.longest.seconds < 0.25


async def test_reset_forgets_earlier_stalls() -> None:
    async with loop_stalls() as stalls:
        time.sleep(0.5)
        await asyncio.sleep(0.05)
        assert stalls.longest.seconds > 0.25
        stalls.reset()
        assert stalls.longest.seconds == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread waited")
async def test_busy_machine_is_no_stall() -> None:
    """Threads in C hold the CPUs, not the interpreter."""
    import hashlib

    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            hashlib.sha256(b"x" * 10**6)

    burners = [threading.Thread(target=burn) for _ in range(16)]
    for burner in burners:
        burner.start()  # waits for the thread, and so is a stall
    async with loop_stalls() as stalls:
        await asyncio.sleep(1.0)
        stop.set()
        await asyncio.gather(*(asyncio.to_thread(burner.join) for burner in burners))
    assert stalls.longest.seconds < 0.25
