"""Executables of programs that come in several sizes, compiled in the order of need.

A program that serves 16 rows also serves one, only slower. So a request whose program is not
compiled yet runs a larger one, while a thread compiles its own. It waits only if there is none.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

log = logging.getLogger(__name__)

Size = tuple[int, ...]


class Compiler:
    """Thread that compiles requested programs one after the other.

    It ends when nothing is left, and between two programs if the process ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None

    def add(self, compile_one: Callable[[], None]) -> None:
        """Compile one more program, after those that were added before."""
        with self._lock:
            self._waiting.append(compile_one)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="compiler")
                self._thread.start()

    def close(self) -> None:
        """Drop what waits, and wait for the program that is being compiled."""
        with self._lock:
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    self._thread = None
                    return
                compile_one = self._waiting.popleft()
            try:
                compile_one()
            except Exception:  # a call that needs this program will raise the error
                log.exception("a program could not be compiled in the background")


class _Entry:
    """Executable of one size, or the error that compiling it ended with."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held by the thread that compiles it
        self.executable: Any = None


class Executables:
    """Executables of one program by size.

    `lower` takes a size and the shapes of the arguments, and returns the lowered program.
    """

    def __init__(self, name: str, lower: Callable[..., Any], compiler: Compiler) -> None:
        self._name, self._lower, self._compiler = name, lower, compiler
        self._entries: dict[Size, _Entry] = {}

    @property
    def ready(self) -> set[Size]:
        """Sizes that are compiled."""
        return {size for size, entry in list(self._entries.items()) if entry.executable}

    def at_least(self, size: Size, *arguments: Any) -> Any:
        """Return the smallest executable that is as large as `size` in all its numbers.

        If that is a larger one, a thread begins to compile `size` for later calls. If there is
        none, compile `size` and wait for it.
        """
        if (entry := self._entries.get(size)) and entry.executable:
            return entry.executable
        larger = [
            other
            for other in self.ready
            if all(mine >= wanted for mine, wanted in zip(other, size, strict=True))
        ]
        if not larger:
            return self.exactly(size, *arguments)
        self.request(size, *arguments)
        return self._entries[min(larger)].executable

    def exactly(self, size: Size, *arguments: Any) -> Any:
        """Return the executable of this size. Compile it if need be, or wait for the thread."""
        entry = self._entries.setdefault(size, _Entry())
        with entry.lock:
            if entry.executable is None:
                started = time.monotonic()
                entry.executable = self._lower(size, *_shapes(arguments)).compile()
                took = time.monotonic() - started
                log.debug("compiled %s %s in %.1f s", self._name, size, took)
        return entry.executable

    def request(self, size: Size, *arguments: Any) -> None:
        """Let the thread compile this size, unless that was requested before."""
        if size in self._entries:
            return
        self._entries[size] = _Entry()
        shapes = _shapes(arguments)
        self._compiler.add(lambda: self.exactly(size, *shapes))


def _shapes(arguments: Any) -> Any:
    """Return the arguments' shapes, dtypes and shardings, without their buffers."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):  # not committed to a device
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(shape, arguments)
