"""Helpers of the `lightning-jax` command. Imports nothing heavy."""

import argparse
import errno
import logging
import signal
from collections.abc import Sequence
from types import FrameType

STOPPED = "stopped; run the same command to resume from the last checkpoint"


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE` and settings, parsed to `arguments.config` and `arguments.settings`."""
    parser.add_argument("--config", required=True, help="YAML file with settings")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="or another YAML file; later values override earlier ones",
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Call `parse_args`, but accept settings on both sides of `--config`."""
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "settings") or any(word.startswith("-") for word in rest)):
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.settings += rest
    return arguments


def log_plainly() -> None:
    """Print this package's log messages as they are, and only warnings of other packages."""
    # force: libraries imported earlier may have configured the root logger.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("lightning_jax").setLevel(logging.INFO)


def stop_on_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C, so that the agents' programs are stopped too.

    The signal goes to the current handler of SIGINT. asyncio's handler cancels the main task. An
    exception raised here instead could be lost in a callback of the garbage collector.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # ignored, as in background jobs of a shell
            interrupt = signal.default_int_handler
        interrupt(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, stop)


def is_unwritable(error: OSError) -> bool:
    """Return True if the disk is full or the path is not writable, which is not a bug of ours."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
