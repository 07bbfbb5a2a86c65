"""Who gets which slot when, and in which chunks a prompt is computed. No JAX in here."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

Request = TypeVar("Request")

CHUNK_OVERHEAD = 32  # what starting one more chunk costs, in tokens of work


@dataclass(frozen=True)
class Admission(Generic[Request]):
    """A request that now owns `slot`."""

    request: Request
    slot: int


class Scheduler(Generic[Request]):
    """First come, first served over a fixed number of slots: they bound what the rows take."""

    def __init__(self, slots: int) -> None:
        self._free = set(range(slots))
        self._waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enqueue(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self._waiting.append(request)

    def remove(self, request: Request) -> bool:
        """Takes a waiting request out of the queue; False if it does not wait."""
        for item in self._waiting:
            if item is request:
                self._waiting.remove(item)
                return True
        return False

    def admit(self) -> Admission[Request] | None:
        """The next request and its slot; None when no slot is free or nobody waits."""
        if not self._free or not self._waiting:
            return None
        request, slot = self._waiting.popleft(), min(self._free)
        self._free.remove(slot)
        self.running[slot] = request
        return Admission(request, slot)

    def release(self, slot: int) -> None:
        """The request on `slot` is done."""
        del self.running[slot]
        self._free.add(slot)

    def clear(self) -> list[Request]:
        """Everybody who waits or runs, after a failure; nobody does afterwards."""
        requests = [*self._waiting, *self.running.values()]
        self._waiting.clear()
        for slot in list(self.running):
            self.release(slot)
        return requests


@lru_cache(maxsize=4096)
def plan_chunks(num_tokens: int, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Bucket lengths that cover `num_tokens` with little padding: 100 with (64, 256) gives (64,
    64).

    All chunks are full but the last. Empty for 0 tokens.
    """
    if num_tokens <= 0:
        return ()
    larger = [bucket for bucket in buckets if bucket >= num_tokens]
    smaller = [bucket for bucket in buckets if bucket < num_tokens]
    plans: list[tuple[int, ...]] = [(larger[0],)] if larger else []
    if smaller:
        plans.append((smaller[-1], *plan_chunks(num_tokens - smaller[-1], buckets)))
    return min(plans, key=lambda plan: sum(plan) + CHUNK_OVERHEAD * len(plan))
