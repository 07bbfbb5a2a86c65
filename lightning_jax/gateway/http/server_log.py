"""Log of aiohttp's server, without what clients sent.

Its messages about a request that it cannot read quote the request, with the URL or the header that
has a rollout's token or the key of the run.
"""

import logging
import time
import traceback

from aiohttp.http_exceptions import HttpProcessingError

WARN_EVERY_S = 10.0


class WithoutRequests(logging.Filter):
    """Filter that replaces errors by their types and places in the code.

    Requests that are no HTTP are counted, and a warning tells their number now and then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_unread, self._warned_at = 0, -WARN_EVERY_S

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
        if time.monotonic() - self._warned_at < WARN_EVERY_S:
            return False
        self._warned_at = time.monotonic()
        record.msg = "refused requests that are not valid HTTP (%d so far), the last one for a %s"
        record.args = (self.num_unread, kind)
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def server_logger() -> logging.Logger:
    """Return a logger for aiohttp's server that has no text of a request."""
    logger = logging.getLogger(__name__)
    if not logger.filters:
        logger.addFilter(WithoutRequests())
    return logger
