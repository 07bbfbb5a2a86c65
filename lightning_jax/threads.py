"""Work in a thread that whoever stops a run has to wait for."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, but cancelled it ends no sooner than the function does.

    A thread cannot be cancelled. What is closed after it, or told to other processes, must not
    come between the device programs that it still starts.
    """
    work = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # whoever stops does not ask for it; else asyncio would report it
        raise
