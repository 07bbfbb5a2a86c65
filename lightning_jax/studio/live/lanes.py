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


def retrieve_failure(work: asyncio.Future[Any]) -> None:
    """Look at the exception of work that has ended, or asyncio logs that nobody did."""
    if not work.cancelled():
        work.exception()


class Lane:
    """Threads for one kind of work. `share` of a core is theirs; 1 or more: no limit.

    The limit is on CPU time, over a burst. It delays the next work, not the answer of the last.
    """

    def __init__(
        self, name: str, num_threads: int, max_waiting: int, share: float = math.inf
    ) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"page-{name}")
        self._max_pending = num_threads + max_waiting
        self._share, self._allowance = share, Allowance(share, BURST_S)
        self._lock, self._closed = threading.Lock(), threading.Event()
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
        retrieve_failure(working)

    def _work(self, function: Callable[[], T]) -> T:
        if self._share >= 1:
            return function()
        with self._lock:
            debt_s = max(-self._allowance.amount(), 0.0)
        self._closed.wait(debt_s / self._share)
        started = time.thread_time()
        try:
            return function()
        finally:
            with self._lock:
                self._allowance.take(time.thread_time() - started)


class Allowance:
    """Amount that grows by `per_s` up to a burst, and that one may take more of than there is.

    Use it in one thread at a time.
    """

    def __init__(
        self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._amount, self._measured_s = burst, clock()

    def amount(self) -> float:
        """Return what may be taken now, below 0 if too much was."""
        now = self._clock()
        grown = self._amount + self._per_s * (now - self._measured_s)
        self._amount, self._measured_s = min(self._burst, grown), now
        return self._amount

    def take(self, amount: float) -> None:
        self._amount -= amount


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
            task.add_done_callback(retrieve_failure)  # nobody may be left who waits for it
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
