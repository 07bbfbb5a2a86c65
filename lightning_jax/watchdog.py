"""Says so where an agent blocks the event loop that it shares with the others."""

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
def watched_loop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, tick_s: float = TICK_S
) -> Iterator[None]:
    """Within it a standstill of the loop, which runs in `thread`, is logged, with the line that it
    stands at.

    Ticks are counted, not seconds, because a process that was stopped for a while has not blocked.
    """
    turned, stop = threading.Event(), threading.Event()

    def watch() -> None:
        missed = 0
        while not stop.wait(tick_s):
            missed = 0 if turned.is_set() else missed + 1
            turned.clear()
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(turned.set)
            if missed == PATIENCE:
                where = current_line(thread)
                log.warning(
                    "an agent has blocked the event loop of all agents for %g s, at %s: no other "
                    "goes on until that returns. An agent should be a plain function, or use an "
                    "async client or asyncio.to_thread, or have a process of its own "
                    "(agent.python).",
                    missed * tick_s,
                    where,
                    extra={"event": "agent_blocks_loop", "where": where},
                )

    turned.set()
    watcher = threading.Thread(target=watch, name="loop-watchdog", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def current_line(thread: threading.Thread) -> str:
    """Return the innermost line of the thread that is neither Python's own nor a library's."""
    assert thread.ident is not None, "it was started"
    stack = traceback.extract_stack(sys._current_frames()[thread.ident])
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    ours = [frame for frame in stack if not frame.filename.startswith(libraries)]
    frame = (ours or list(stack))[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name} ({frame.line})"
