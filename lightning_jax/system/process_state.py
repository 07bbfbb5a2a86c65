"""State that all code of a process shares, and that foreign code in it may change.

Agents that are functions run in the process of the run. A directory, a umask or a filter of
warnings that one of them leaves behind would be that of the run and of all other agents. So
would be the handler of a signal.
"""

import contextlib
import locale
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

PACKAGE = "lightning_jax"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], Any]


@dataclass(frozen=True)
class _Part:
    """One thing that a process has once: how to read it and how to set it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _umask() -> int:
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    return umask


def _forget_errors(kept: tuple[Any, ...]) -> None:
    others = [rule for rule in warnings.filters if rule[0] != "error" or rule in kept]
    warnings.filters[:] = others  # type: ignore[index]
    with warnings.catch_warnings():  # tells the interpreter that they have changed
        pass


def _silenced() -> tuple[int, tuple[str, ...]]:
    """Return the level below which nothing is logged, and the loggers of ours that are off."""
    manager = logging.root.manager
    ours = [
        name
        for name, logger in manager.loggerDict.items()
        if name.startswith(PACKAGE) and getattr(logger, "disabled", False)
    ]
    return manager.disable, tuple(sorted(ours))


def _speak(state: tuple[int, tuple[str, ...]]) -> None:
    level, off = state
    logging.disable(level)
    for name in set(_silenced()[1]) - set(off):
        logging.getLogger(name).disabled = False


def _set_handlers(handlers: tuple[Any, ...]) -> None:
    if threading.current_thread() is threading.main_thread():  # others may not set them
        for number, handler in zip(STOP_SIGNALS, handlers, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


PARTS = {
    "working directory": _Part(_directory, lambda path: None if path is None else os.chdir(path)),
    "umask": _Part(_umask, os.umask),
    "sys.stdout": _Part(lambda: sys.stdout, lambda value: setattr(sys, "stdout", value)),
    "sys.stderr": _Part(lambda: sys.stderr, lambda value: setattr(sys, "stderr", value)),
    "directory of temporary files": _Part(
        lambda: tempfile.tempdir, lambda value: setattr(tempfile, "tempdir", value)
    ),
    "filters of warnings": _Part(  # those that raise errors, which code of others may not expect
        lambda: tuple(rule for rule in warnings.filters if rule[0] == "error"), _forget_errors
    ),
    "logging": _Part(_silenced, _speak),
    "locale": _Part(
        lambda: locale.setlocale(locale.LC_ALL),
        lambda value: locale.setlocale(locale.LC_ALL, value),
    ),
    "timeout of sockets": _Part(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "handlers of SIGINT and SIGTERM": _Part(
        lambda: tuple(map(signal.getsignal, STOP_SIGNALS)), _set_handlers
    ),
}


class ProcessState:
    """The shared state at the time when this object is made."""

    def __init__(self) -> None:
        tempfile.gettempdir()  # chosen now
        self._found = {name: part.read() for name, part in PARTS.items()}

    @property
    def is_unusable(self) -> bool:
        """True if code fails that has changed nothing: a directory is gone, or output is closed."""
        streams = (sys.stdout, sys.stderr)
        return (
            _directory() is None
            or not os.path.isdir(tempfile.gettempdir())
            or any(getattr(stream, "closed", False) for stream in streams)
        )

    def restore(self) -> list[str]:
        """Restore what has changed, and return its names."""
        changed = [name for name, part in PARTS.items() if part.read() != self._found[name]]
        for name in changed:
            with contextlib.suppress(OSError, ValueError, locale.Error):
                PARTS[name].write(self._found[name])
        return changed


@contextlib.contextmanager
def kept_process() -> Iterator[ProcessState]:
    """Restore the shared state at the end of this context."""
    state = ProcessState()
    try:
        yield state
    finally:
        state.restore()


@contextlib.contextmanager
def handle_stop_signals(handler: Handler) -> Iterator[None]:
    """Call `handler` at SIGINT and SIGTERM within the context.

    An ignored signal, as in background jobs, stays ignored.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    replaced = {n: before for n, before in handlers.items() if before is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)
