"""Work that shutdown has to wait for."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but if cancelled, wait for the function to finish before raising.

    A thread cannot be cancelled. It may still start device programs, and closing objects or sending
    commands to other processes must not come in between.
    """
    return await run_to_end(asyncio.to_thread(function, *args, **kwargs))


async def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await the coroutine. If cancelled, do not cancel it, and wait for its end before raising."""
    work = asyncio.create_task(coroutine)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # retrieve it, or asyncio reports it
        raise
