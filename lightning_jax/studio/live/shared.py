"""Answers that requests share, so that ten pages cost a training about as much as one."""

import asyncio
import gzip
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from lightning_jax.studio.live.lanes import Lane

MAX_AGE_S = 1.0
MAX_KEPT = 64  # answers
MIN_ZIPPED = 1024  # bytes; shorter ones are sent as they are


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
