"""Log messages in plain lines, which no text of an agent can imitate."""

import logging

from lightning_jax.system.text import with_marked_lines


class PlainFormatter(logging.Formatter):
    """Formatter of messages as they are, without control characters and forged lines.

    Messages may contain texts of agents.
    """

    def format(self, record: logging.LogRecord) -> str:
        return with_marked_lines(super().format(record))


def plain_handler() -> logging.Handler:
    """Return a handler that prints messages to standard error as `PlainFormatter` writes them."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter())
    return handler


def log_plainly() -> None:
    """Print this package's log messages, and only warnings of other packages."""
    # force: libraries imported earlier may have configured the root logger.
    logging.basicConfig(level=logging.WARNING, handlers=[plain_handler()], force=True)
    logging.getLogger("lightning_jax").setLevel(logging.INFO)
