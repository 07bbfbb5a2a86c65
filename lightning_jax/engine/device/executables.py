"""Executables of programs that come in several sizes, compiled in the order of need.

A program that serves 16 rows also serves one, only slower. So a call whose program is not compiled
yet runs a larger one, and waits only if there is none. The time that is lost so is added up. Once
it is half of a compilation's, a thread compiles the program itself. While the engine has nothing to
do, a quarter is enough.

A compilation that only loads a program from the cache on disk takes a tenth of the time. So what
was compiled by an earlier process is loaded sooner.
"""

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np

log = logging.getLogger(__name__)

Size = tuple[int, ...]

NUM_TIMED = 3  # calls of each size that are timed, and therefore awaited
# Of a compilation's time, to be lost before a program is compiled. Calls go on beside it, so it
# costs them about half of its time. If as much was lost before, both together are at most twice
# what the best choice in hindsight costs.
BUSY_SHARE = 0.5
IDLE_SHARE = 0.25


class Costs:
    """Seconds of one call by size.

    Sizes that never ran are on a line through those that did, by the product of their numbers. With
    one size measured, `fixed_share` of its time is taken for what a call of any size needs, such as
    reading the weights.
    """

    def __init__(self, fixed_share: float) -> None:
        self._fixed_share = fixed_share
        self._fastest: dict[Size, float] = {}

    def add(self, size: Size, seconds: float) -> None:
        """Add a measured call. The fastest call of a size counts, as others had to wait."""
        self._fastest[size] = min(seconds, self._fastest.get(size, seconds))

    def seconds(self, size: Size) -> float | None:
        """Return the seconds of a call of this size, or None if nothing was measured yet."""
        fastest = self._fastest.copy()
        if size in fastest or not fastest:
            return fastest.get(size)
        works = np.array([math.prod(other) for other in fastest])
        times = np.array(list(fastest.values()))
        if works.min() == works.max():
            slope = (1 - self._fixed_share) * times.min() / works[0]
        else:
            slope = max(float(np.polyfit(works, times, 1)[0]), 0.0)
        fixed = max(float(times.mean() - slope * works.mean()), 0.0)
        return fixed + slope * math.prod(size)


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

    @property
    def is_busy(self) -> bool:
        """True while the thread compiles."""
        return self._thread is not None

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

    def __init__(
        self, name: str, lower: Callable[..., Any], compiler: Compiler, costs: Costs
    ) -> None:
        self.lower, self.costs = lower, costs
        self._name, self._compiler = name, compiler
        self._ready: dict[Size, Any] = {}
        self._locks: dict[Size, threading.Lock] = {}  # held while a thread compiles the size
        self._num_timed: Counter[Size] = Counter()
        self._lost_s: defaultdict[Size, float] = defaultdict(float)
        self._shapes: dict[Size, Any] = {}  # of the arguments, where time was lost
        self._compile_s = 0.0  # of the latest compilation
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

    def has(self, size: Size) -> bool:
        """Return True if `run` would not wait for a compilation."""
        return size in self._ready or bool(_at_least(size, self.ready))

    def run(self, size: Size, *arguments: Any) -> Any:
        """Run the smallest executable that is as large as `size` in each of its numbers.

        If that is a larger one, count the time that it takes longer. If there is none, wait for the
        smallest that is requested, or else compile `size`.
        """
        ready = [size] if size in self._ready else _at_least(size, self.ready)
        if not ready:
            requested = _at_least(size, self._requested.copy())
            return self.run_exactly(min(requested, default=size), *arguments)
        chosen = min(ready)
        if chosen != size:
            longer, shorter = self.costs.seconds(chosen), self.costs.seconds(size)
            self.lose(size, (longer or 0.0) - (shorter or 0.0), *arguments)
        return self._timed(chosen, arguments)

    def run_exactly(self, size: Size, *arguments: Any) -> Any:
        """Run the executable of this size. Compile it first, unless that has been done."""
        self.compile(size, *arguments)
        return self._timed(size, arguments)

    def compile(self, size: Size, *arguments: Any) -> None:
        """Compile this size, unless that has been done."""
        if size not in self._ready:
            started = time.monotonic()
            self._compile(size, *arguments)
            self.waited_s += time.monotonic() - started

    def _timed(self, size: Size, arguments: Any) -> Any:
        if self._num_timed[size] >= NUM_TIMED:
            return self._ready[size](*arguments)
        self._num_timed[size] += 1
        jax.block_until_ready(arguments)  # else their own computation would be timed
        started = time.monotonic()
        result = jax.block_until_ready(self._ready[size](*arguments))
        self.costs.add(size, time.monotonic() - started)
        return result

    def lose(self, size: Size, seconds: float, *arguments: Any) -> None:
        """Count time lost because this size is not compiled. Request it once that pays back."""
        if size not in self._shapes:
            self._shapes[size] = _shapes(arguments)
        self._lost_s[size] += max(seconds, 0.0)
        if self._lost_s[size] >= BUSY_SHARE * self._compile_s:
            self.request(size, *arguments)

    def request_while_idle(self) -> bool:
        """Request the size that lost most time, if that is enough for an idle engine."""
        waiting = {
            size: lost_s
            for size, lost_s in self._lost_s.copy().items()
            if size not in self._ready and size not in self._requested
        }
        worst = max(waiting, key=lambda size: waiting[size], default=None)
        if worst is None or waiting[worst] < IDLE_SHARE * self._compile_s:
            return False
        self.request(worst, *self._shapes[worst])
        return True

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
            self._compile_s = time.monotonic() - started
            log.debug("compiled %s %s in %.1f s", self._name, size, self._compile_s)


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
