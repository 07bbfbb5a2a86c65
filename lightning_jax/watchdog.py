"""Says so where a coroutine blocks the event loop that agents and gateway share."""

import asyncio
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

TICK_S = 1.0
PATIENCE = 10  # ticks without a turn of the loop


@contextmanager
def watched_loop(tick_s: float = TICK_S) -> Iterator[None]:
    """Within it a standstill of this event loop is logged, with the line that it stands at.

    An agent that blocks, with a synchronous client say, waits for the very server that it keeps
    from answering, and no deadline ends that. Ticks are counted, not seconds, because a process
    that was stopped for a while has not blocked.
    """
    loop, turned, stop = asyncio.get_running_loop(), threading.Event(), threading.Event()
    thread = threading.get_ident()

    def watch() -> None:
        missed = 0
        while not stop.wait(tick_s):
            missed = 0 if turned.is_set() else missed + 1
            turned.clear()
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(turned.set)
            if missed == PATIENCE:
                log.warning(
                    "the event loop has stood still for %g s, at %s: no call is answered and no "
                    "deadline kept until that returns. An agent must not block: use an async "
                    "client or asyncio.to_thread, or give it a process of its own (agent.python).",
                    missed * tick_s,
                    _place(thread),
                )

    turned.set()
    watcher = threading.Thread(target=watch, name="loop-watchdog", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def _place(thread: int) -> str:
    """The innermost line of that thread which is neither Python's own nor a library's."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    ours = [frame for frame in stack if not frame.filename.startswith(libraries)]
    frame = (ours or list(stack))[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name} ({frame.line})"
