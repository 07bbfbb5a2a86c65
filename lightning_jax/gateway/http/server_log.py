"""Log of the server: of aiohttp, without what clients sent, and of exhausted file descriptors.

Messages of aiohttp about a request that it cannot read quote the request, with the URL or the
header that has a rollout's token or the key of the run.
"""

import asyncio
import logging
import time
import traceback
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from lightning_jax.system.descriptors import is_exhausted

log = logging.getLogger(__name__)

WARN_EVERY_S = 10.0


class NowAndThen:
    """Limit on warnings: one in WARN_EVERY_S."""

    def __init__(self) -> None:
        self._warned_at = -WARN_EVERY_S

    def are_due(self) -> bool:
        """Return True if a warning may be logged, and count it."""
        is_due = time.monotonic() - self._warned_at >= WARN_EVERY_S
        self._warned_at = time.monotonic() if is_due else self._warned_at
        return is_due


class WithoutRequests(logging.Filter):
    """Filter that replaces errors by their types and places in the code.

    Requests that are no HTTP are counted, and a warning tells their number now and then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_unread, self._warnings = 0, NowAndThen()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        record.exc_info = None
        kind = type(error).__name__
        if not isinstance(error, HttpProcessingError):
            record.exc_text = "".join([*traceback.format_tb(error.__traceback__), kind])
            return True
        self.num_unread += 1
        if not self._warnings.are_due():
            return False
        record.msg = "refused requests that are not valid HTTP (%d so far), the last one for a %s"
        record.args = (self.num_unread, kind)
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def server_logger() -> logging.Logger:
    """Return a logger for aiohttp's server that has no text of a request."""
    logger = logging.getLogger(f"{__name__}.aiohttp")
    if not logger.filters:
        logger.addFilter(WithoutRequests())
    return logger


class ExhaustionLog:
    """Exception handler of an event loop that reports exhausted file descriptors only now and then.

    asyncio would report every failed accept. All other errors go to the previous handler.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._before = loop, loop.get_exception_handler()
        self.num_failed, self._warnings = 0, NowAndThen()
        loop.set_exception_handler(self)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and is_exhausted(error)):
            if self._before is None:
                loop.default_exception_handler(context)
            else:
                self._before(loop, context)
            return
        self.num_failed += 1
        if self._warnings.are_due():
            log.warning(
                "out of file descriptors; new connections wait (%d tries so far): %s. Raise "
                "`ulimit -Hn`, or lower rollout.concurrency or serve.max_connections.",
                *(self.num_failed, error),
                extra={"event": "no_descriptors", "num_failed": self.num_failed},
            )

    def close(self) -> None:
        """Restore the event loop's previous handler."""
        self._loop.set_exception_handler(self._before)
