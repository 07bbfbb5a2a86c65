"""Who gets which slot when, and how prompts are cut into batches of chunks. No JAX in here."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
        full = (num_tokens - 1) // smaller[-1]
        rest = plan_chunks(num_tokens - full * smaller[-1], buckets)
        plans.append((smaller[-1],) * full + rest)
    return min(plans, key=lambda plan: sum(plan) + CHUNK_OVERHEAD * len(plan))


@dataclass(frozen=True)
class ChunkBatch:
    """Chunks that one program computes: tokens `first` to `end` of each of these prompts."""

    bucket: int  # the length that they are padded to
    chunks: tuple[tuple[int, int, int], ...]  # (prompt, first, end)


def row_counts(bucket: int, tokens: int, most: int) -> tuple[int, ...]:
    """How many chunks of this bucket a program takes: 32 gives 1, 4, 16 for up to 512 tokens."""
    counts = [1]
    while (more := 4 * counts[-1]) <= most and more * bucket <= tokens:
        counts.append(more)
    return tuple(counts)


def plan_prefill(
    lengths: Sequence[int], buckets: tuple[int, ...], counts: Mapping[int, tuple[int, ...]]
) -> Iterator[ChunkBatch]:
    """All chunks of prompts of these lengths, a prompt's own in order. `counts` says of each
    bucket how many chunks a batch may have.
    """
    plans = [deque(plan_chunks(length, buckets)) for length in lengths]
    done = [0] * len(lengths)
    for bucket in sorted(buckets, reverse=True):  # as a prompt's own chunks, the large ones first
        while due := [i for i, plan in enumerate(plans) if plan and plan[0] == bucket]:
            batch = []
            for i in due[: max(count for count in counts[bucket] if count <= len(due))]:
                plans[i].popleft()
                end = min(done[i] + bucket, lengths[i])
                batch.append((i, done[i], end))
                done[i] = end
            yield ChunkBatch(bucket, tuple(batch))
