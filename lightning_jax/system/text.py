"""Untrusted text of agents, models, tools and files: search it, and make it safe to print."""

import logging

CONTINUED = "  | "  # before each line of a message but the first

# Control characters can move a terminal's cursor or write to its clipboard. Direction characters
# reverse the text after them. Half a surrogate pair cannot be encoded in UTF-8.
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)
_SIGNS = (
    {code: "\ufffd" for code in (*range(0x80, 0xA0), *_DIRECTIONS, *_SURROGATES)}
    | {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
    | {0x7F: "\u2421"}
)


def printable(text: str) -> str:
    """Replace each control character by a visible sign.

    "a\\x1b[2J" becomes "a␛[2J", and line ends become "\\n".
    """
    return text.replace("\r\n", "\n").translate(_SIGNS)


def with_marked_lines(text: str) -> str:
    """Return printable text whose lines but the first begin with a mark.

    A line end in the text of an agent then begins no line that looks like one of ours.
    """
    return f"\n{CONTINUED}".join(printable(text).splitlines())


def in_one_line(text: str, limit: int = 300) -> str:
    """Return the text without control characters and line ends, cut to `limit` characters."""
    words = " ".join(printable(text[: 4 * limit]).split())
    return words if len(words) <= limit else f"{words[: limit - 3]}..."


def has_words(text: str, part: str) -> bool:
    """Return True if the text contains `part`, regardless of the white space between words."""
    return " ".join(part.split()) in " ".join(text.split())


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
