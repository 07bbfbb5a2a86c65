"""Executables of programs that come in several sizes, compiled in the order of need.

A program that serves 16 rows also serves one, only slower. So a call whose program is not compiled
yet runs a larger one, and waits only if there is none. A thread compiles the program itself once
enough calls have asked for it, because a compilation takes the CPU from everything else.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np

log = logging.getLogger(__name__)

Size = tuple[int, ...]

# Calls of a larger program that take as long as one compilation: with SmolLM2-135M on two cores, 75
# to 110 ms a step of 16 slots and 6 s. A size that fewer calls want is not worth its compilation.
CALLS_TO_PAY_BACK = 64


class Compiler:
    """Thread that compiles what was requested, in order.

    It ends when nothing is left, and after the current program if the process ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, Callable[[], Any]] = {}
        self._thread: threading.Thread | None = None

    def request(self, name: Hashable, compile_one: Callable[[], Any]) -> None:
        """Add a program to the queue. Do nothing if one with this name waits already."""
        with self._lock:
            self._waiting.setdefault(name, compile_one)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="compiler")
                self._thread.start()

    def close(self) -> None:
        """Drop the queue, and wait for the program that is being compiled."""
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
                name = next(iter(self._waiting))
                compile_one = self._waiting.pop(name)
            try:
                compile_one()
            except Exception:  # a call that needs this program raises the error
                log.exception("the program %s could not be compiled in advance", name)


class Executables:
    """Executables of one program by size.

    `lower` takes a size and the arguments' shapes, and returns the lowered program. All methods may
    be called from any thread.
    """

    def __init__(self, name: str, lower: Callable[..., Any], compiler: Compiler) -> None:
        self.lower = lower
        self._name, self._compiler = name, compiler
        self._ready: dict[Size, Any] = {}
        self._locks: dict[Size, threading.Lock] = {}  # held while a thread compiles the size
        self._calls: Counter[Size] = Counter()  # of `count_call`
        self._requested: set[Size] = set()
        self._compiling: set[Size] = set()
        self.waited_s = 0.0  # of callers, for executables that were not ready

    @property
    def ready(self) -> frozenset[Size]:
        """Sizes that are compiled."""
        return frozenset(self._ready.copy())

    @property
    def num_compiling(self) -> int:
        """Number of sizes that are being compiled now."""
        return len(self._compiling)

    def at_least(self, size: Size, *arguments: Any) -> Any:
        """Return the smallest executable that is as large as `size` in each of its numbers.

        If that is a larger one, count a call for `size`. If there is none, wait for the smallest
        that is requested, or else compile `size`.
        """
        if size in self._ready:
            return self._ready[size]
        if ready := _at_least(size, self.ready):
            self.count_call(size, *arguments)
            return self._ready[min(ready)]
        requested = _at_least(size, self._requested.copy())
        return self.exactly(min(requested, default=size), *arguments)

    def exactly(self, size: Size, *arguments: Any) -> Any:
        """Return the executable of this size. Compile it, unless that has been done."""
        if size not in self._ready:
            started = time.monotonic()
            self._compile(size, *arguments)
            self.waited_s += time.monotonic() - started
        return self._ready[size]

    def count_call(self, size: Size, *arguments: Any, calls: int = 1) -> None:
        """Count calls that other sizes serve for this one, and request it once it pays back."""
        self._calls[size] += calls
        if self._calls[size] >= CALLS_TO_PAY_BACK:
            self.request(size, *arguments)

    def request(self, size: Size, *arguments: Any) -> None:
        """Let the compiler's thread compile this size, unless that was done or asked for."""
        if size not in self._ready and size not in self._requested:
            shapes = _shapes(arguments)
            self._requested.add(size)
            self._compiler.request((self._name, size), lambda: self._compile(size, *shapes))

    def _compile(self, size: Size, *arguments: Any) -> None:
        with self._locks.setdefault(size, threading.Lock()):
            if size in self._ready:
                return
            started = time.monotonic()
            self._compiling.add(size)
            try:
                self._ready[size] = self.lower(size, *_shapes(arguments)).compile()
            finally:
                self._compiling.remove(size)
            seconds = time.monotonic() - started
            log.debug("compiled %s %s in %.1f s", self._name, size, seconds)


def _at_least(size: Size, sizes: Iterable[Size]) -> list[Size]:
    return [
        other
        for other in sizes
        if all(has >= needed for has, needed in zip(other, size, strict=True))
    ]


def _shapes(arguments: Any) -> Any:
    """Return the arguments' shapes, dtypes and shardings, without their buffers."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):  # committed to no device
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(shape, arguments)
