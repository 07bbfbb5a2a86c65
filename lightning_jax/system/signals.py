"""Handlers of the signals that ask a process to stop."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handle_stop_signals(handler: Handler) -> Iterator[None]:
    """Call `handler` at SIGINT and SIGTERM within the context.

    An ignored signal, as in background jobs, stays ignored.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    replaced = {n: found for n, found in handlers.items() if found is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, found in replaced.items():
            signal.signal(number, found)
