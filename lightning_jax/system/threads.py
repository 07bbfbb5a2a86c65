"""Work in threads: shutdown waits for it, and threads take turns."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
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


def start_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call a function of others in a thread of its own, which no exit of this process waits for.

    A call that never returns takes no thread of a pool, so it blocks nobody.
    """
    future: Future[T] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  (raised again in the waiting caller)
            future.set_exception(error)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return future


class DeviceTurns:
    """Lock that a thread which takes it again and again leaves to others in between."""

    def __init__(self) -> None:
        self._next, self._held = threading.Lock(), threading.Lock()

    def __enter__(self) -> "DeviceTurns":
        with self._next:  # whoever waits for the lock keeps this one
            self._held.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.release()
