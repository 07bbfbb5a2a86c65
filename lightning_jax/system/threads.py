"""Work in a thread that shutdown has to wait for."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but if cancelled, wait for the function to finish before raising.

    A thread cannot be cancelled. It may still start device programs, and closing objects or sending
    commands to other processes must not come in between.
    """
    work = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # retrieve it, or asyncio reports it
        raise
