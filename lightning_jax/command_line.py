"""What the `lightning-jax` command and the scripts in experiments/ share. Imports nothing large."""

import argparse
import errno
import logging
import signal
from collections.abc import Sequence
from types import FrameType

STOPPED = "stopped; the same command goes on from the last checkpoint"


def add_settings(parser: argparse.ArgumentParser) -> None:
    """`--config FILE` and what may follow it: `arguments.config` and `arguments.settings`."""
    parser.add_argument("--config", required=True, help="a YAML file of settings")
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="or another such file; later ones win"
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """As `parse_args`, with settings on both sides of `--config`, too."""
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "settings") or any(word.startswith("-") for word in rest)):
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.settings += rest
    return arguments


def log_plainly() -> None:
    """Our own messages as they are, of others only warnings."""
    # force: libraries that were imported above have set up the root logger for themselves.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("lightning_jax").setLevel(logging.INFO)


def stop_on_sigterm() -> None:
    """As Ctrl-C: what stops jobs must not leave the programs of their agents behind.

    It goes to the handler that SIGINT has by then. That of asyncio cancels the main task; an
    exception raised wherever the main thread is would be lost in a callback of the collector.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # ignored, as in a shell's background jobs
            interrupt = signal.default_int_handler
        interrupt(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, stop)


def is_place_closed(error: OSError) -> bool:
    """Whether a disk is full or a place may not be written, which is not our fault."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
