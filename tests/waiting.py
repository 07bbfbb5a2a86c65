"""Waiting for a condition."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], T], timeout_s: float = 60.0) -> T:
    """Return the condition's value as soon as it is true."""
    async with asyncio.timeout(timeout_s):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value
