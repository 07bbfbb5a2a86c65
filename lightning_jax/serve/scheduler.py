"""Who gets which slot, and what of its prompt need not be computed again. No JAX in here."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from lightning_jax.serve.prefix_cache import PrefixCache

Request = TypeVar("Request")

MIN_REUSE = 8  # tokens; copying a row for fewer costs more than computing them
CHUNK_OVERHEAD = 32  # what starting one more chunk costs, in tokens of work


@dataclass(frozen=True)
class Admission(Generic[Request]):
    """A request that now owns `slot`; its first `reuse` prompt tokens lie in row `source`."""

    request: Request
    slot: int
    source: int
    reuse: int


class Scheduler(Generic[Request]):
    """First come, first served over a fixed number of slots."""

    def __init__(self, slots: int, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes
        self._free = set(range(slots))
        self._waiting: deque[tuple[Request, tuple[int, ...]]] = deque()
        self.running: dict[int, Request] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enqueue(self, request: Request, prompt: tuple[int, ...]) -> None:
        """Puts a request at the end of the queue."""
        self._waiting.append((request, prompt))

    def remove(self, request: Request) -> bool:
        """Takes a waiting request out of the queue; False if it does not wait."""
        for item in self._waiting:
            if item[0] is request:
                self._waiting.remove(item)
                return True
        return False

    def admit(self) -> Admission[Request] | None:
        """The next request and its slot; None when no slot is free or nobody waits.

        The caller fills the row before it admits the next one, so that siblings find each other's
        prompt.
        """
        if not self._free or not self._waiting:
            return None
        request, prompt = self._waiting.popleft()
        slot, source, reuse = self._place(prompt)
        self._free.remove(slot)
        self.running[slot] = request
        return Admission(request, slot, source, reuse)

    def release(self, slot: int) -> None:
        """The request on `slot` is done; its row stays readable until it is given away."""
        del self.running[slot]
        self._free.add(slot)
        self._prefixes.touch(slot)

    def clear(self) -> list[Request]:
        """Everybody who waits or runs, after a failure; nobody does afterwards."""
        requests = [request for request, _ in self._waiting] + list(self.running.values())
        self._waiting.clear()
        for slot in list(self.running):
            self.release(slot)
        return requests

    def _place(self, prompt: tuple[int, ...]) -> tuple[int, int, int]:
        """Slot, source row and reused length. The last prompt token is never reused: it is decoded.

        A free row that the prompt extends to its end is continued in place. A longer one still
        serves the conversation that made it, so its beginning is copied.
        """
        match = self._prefixes.match(prompt[:-1])
        if match.length < MIN_REUSE:
            slot = self._prefixes.least_recent(tuple(self._free))
            return slot, slot, 0
        if match.slot in self._free and self._prefixes.length(match.slot) == match.length:
            return match.slot, match.slot, match.length
        slot = self._prefixes.least_recent(tuple(self._free))
        return slot, match.slot, match.length


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
