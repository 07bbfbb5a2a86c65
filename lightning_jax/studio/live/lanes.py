"""Threads of the live page, apart from those of the training that it may share a process with.

A lane has few threads, a bounded queue and a share of a core. What exceeds the queue is refused, so
that no number of pages slows the training. Requests share answers, so that ten pages cost about as
much as one.
"""

import asyncio
import gzip
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from pydantic_core import to_json

T = TypeVar("T")

BURST_S = 0.5  # of CPU time that a lane may take at once
RETRY_AFTER_S = 1
# Limits of a page in the process of a training run. Together the two lanes and the event loop take
# about a tenth of a core.
SHARE = 0.03  # of a core, for each lane
RATE = 60.0  # requests per second
MAX_AGE_S = 1.0
MAX_KEPT = 64  # answers
MIN_ZIPPED = 1024  # bytes; shorter ones are sent as they are
REFUSED_S = 1.0  # a refused request is answered late, so that asking again at once costs little


def too_busy(reason: str) -> web.HTTPServiceUnavailable:
    """Return the refusal of a request that would wait too long."""
    return web.HTTPServiceUnavailable(reason=reason, headers={"Retry-After": str(RETRY_AFTER_S)})


class Lane:
    """Threads for one kind of work. `share` of a core is theirs; 1 or more: no limit.

    The limit is on CPU time, over a burst. It delays the next work, not the answer of the last.
    """

    def __init__(
        self, name: str, num_threads: int, max_waiting: int, share: float = math.inf
    ) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"page-{name}")
        self._max_pending = num_threads + max_waiting
        self._share = share
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._credit_s, self._at = BURST_S, time.monotonic()
        self.num_pending = 0
        self.num_refused = 0

    async def run(self, function: Callable[[], T], *, is_admitted: bool = False) -> T:
        """Return the function's result. Raises HTTPServiceUnavailable if too many wait.

        Work that `is_admitted` belongs to a request that runs already, and is not refused.
        """
        if self.num_pending >= self._max_pending and not is_admitted:
            self.num_refused += 1
            raise too_busy("the page is busy")
        self.num_pending += 1
        working = asyncio.get_running_loop().run_in_executor(self._executor, self._work, function)
        working.add_done_callback(self._on_done)  # also if the caller is cancelled
        return await asyncio.shield(working)

    def close(self) -> None:
        """Accept no more work. Do not wait for running work."""
        self._closed.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _on_done(self, working: asyncio.Future[T]) -> None:
        self.num_pending -= 1
        if not working.cancelled():
            working.exception()  # retrieved, even if nobody waits for it

    def _work(self, function: Callable[[], T]) -> T:
        if self._share >= 1:
            return function()
        self._closed.wait(self._debt_s() / self._share)
        started = time.thread_time()
        try:
            return function()
        finally:
            self._charge(time.thread_time() - started)

    def _debt_s(self) -> float:
        """Return the CPU time that this lane has taken beyond its share."""
        with self._lock:
            now = time.monotonic()
            self._credit_s = min(BURST_S, self._credit_s + self._share * (now - self._at))
            self._at = now
            return max(-self._credit_s, 0.0)

    def _charge(self, cpu_s: float) -> None:
        with self._lock:
            self._credit_s -= cpu_s


class Rate:
    """Limit of requests per second, over a burst. Use it in one event loop."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._left, self._at = 2 * per_s, clock()

    def admits(self) -> bool:
        """Count a request. Return False if there are too many."""
        now = self._clock()
        self._left = min(2 * self._per_s, self._left + self._per_s * (now - self._at))
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


# Shared answers


@dataclass(frozen=True)
class Encoded:
    """JSON as bytes, and the same compressed, or None if it is short."""

    body: bytes
    zipped: bytes | None


def encode(value: Any) -> Encoded:
    """Return a value as JSON. Numbers that are not finite are null."""
    body = to_json(value, inf_nan_mode="null")
    return Encoded(body, gzip.compress(body, 4) if len(body) >= MIN_ZIPPED else None)


class SharedAnswers:
    """Answers by address, computed in a lane. One may be a second old. Use it in one event loop."""

    def __init__(self, lane: Lane, max_age_s: float = MAX_AGE_S) -> None:
        self._lane, self.max_age_s, self.num_computed = lane, max_age_s, 0
        self._tasks: OrderedDict[str, tuple[float, asyncio.Task[Encoded]]] = OrderedDict()

    async def get(self, address: str, compute: Callable[[], Any]) -> Encoded:
        """Return the answer, which a thread computes unless it is known or being computed.

        An exception of `compute` reaches all who wait for it, and is not kept. Raises
        HTTPServiceUnavailable if too many answers are being computed.
        """
        begun, task = self._tasks.get(address, (0.0, None))
        is_known = task is not None and (
            not task.done() or time.monotonic() - begun < self.max_age_s
        )
        if task is None or not is_known:
            task = asyncio.create_task(self._lane.run(lambda: encode(compute())))
            task.add_done_callback(_look_at)  # nobody may be left who waits for it
            self.num_computed += 1
            self._tasks[address] = time.monotonic(), task
            self._tasks.move_to_end(address)
            while len(self._tasks) > MAX_KEPT:
                self._tasks.popitem(last=False)
        try:
            return await asyncio.shield(task)  # others may wait when this client leaves
        except Exception:
            if self._tasks.get(address, (0.0, None))[1] is task:
                del self._tasks[address]
            raise


def _look_at(task: asyncio.Task[Encoded]) -> None:
    """Retrieve a failure, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()
