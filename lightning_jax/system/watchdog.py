"""Warning about an agent that blocks the event loop it shares with others."""

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
PATIENCE = 10  # ticks without an iteration of the loop


@contextmanager
def watched_loop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, tick_s: float = TICK_S
) -> Iterator[None]:
    """Log, while this context is open, when the loop in `thread` is blocked, and at which line.

    Ticks are counted instead of seconds, because a process that was suspended has not blocked.
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
                    "an agent has blocked the event loop of all agents for %g s at %s; make it a "
                    "plain function, use an async client or asyncio.to_thread, or run it in its "
                    "own process (agent.python)",
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
    """Return the thread's innermost line outside the standard library and installed packages."""
    assert thread.ident is not None, "it was started"
    stack = traceback.extract_stack(sys._current_frames()[thread.ident])
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    ours = [frame for frame in stack if not frame.filename.startswith(libraries)]
    frame = (ours or list(stack))[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name} ({frame.line})"
