"""Assignment of slots to requests, of time to prompts, and of chunks to batches. No JAX."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

Request = TypeVar("Request")
Caller = tuple[str | None, str | None]  # tenant and call

CHUNK_OVERHEAD = 32  # cost of one more chunk, in tokens of work


@dataclass(frozen=True)
class Admission(Generic[Request]):
    """Request that now holds `slot`."""

    request: Request
    slot: int


class Scheduler(Generic[Request]):
    """Fair queues over a fixed number of slots, one queue per call.

    A call belongs to a tenant: its rollout, or None outside of rollouts. A call's requests are
    served in order of arrival. A free slot goes to the tenant that holds the fewest slots, and of
    its calls to the one that holds the fewest. Among equals, it goes to the one served least
    recently.

    A rollout that holds half of the slots leaves the last free slot to the others, and so does a
    call outside of rollouts. So the others' next request does not wait for a response to end.
    Requests without a rollout and a call are not held back.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = set(range(slots))
        # Tenants with waiting requests, and the calls of each, least recently served first.
        self._queues: dict[str | None, dict[str | None, deque[Request]]] = {}
        self._held: Counter[str | None] = Counter()  # slots by tenant
        self._held_by_call: Counter[Caller] = Counter()
        self._callers: dict[int, Caller] = {}  # by slot
        self.running: dict[int, Request] = {}

    def enqueue(self, request: Request, tenant: str | None = None, call: str | None = None) -> None:
        """Add a request to the end of its call's queue."""
        self._queues.setdefault(tenant, {}).setdefault(call, deque()).append(request)

    def remove(self, request: Request) -> bool:
        """Remove a waiting request from its queue. Return False if it is not waiting."""
        for tenant, calls in self._queues.items():
            for call, queue in calls.items():
                for item in queue:
                    if item is request:
                        queue.remove(item)
                        if not queue:
                            del calls[call]
                        if not calls:
                            del self._queues[tenant]
                        return True
        return False

    def admit(self) -> Admission[Request] | None:
        """Return the next request and its slot, or None if no call may have a slot now."""
        if not self._free:
            return None
        runnable = {
            tenant: eligible
            for tenant, calls in self._queues.items()
            if (eligible := [call for call in calls if self._may_run(tenant, call)])
        }
        if not runnable:
            return None
        tenant = min(runnable, key=self._held.__getitem__)
        call = min(runnable[tenant], key=lambda call: self._held_by_call[tenant, call])
        calls = self._queues.pop(tenant)
        queue = calls.pop(call)
        request, slot = queue.popleft(), min(self._free)
        if queue:
            calls[call] = queue  # behind the others
        if calls:
            self._queues[tenant] = calls
        self._free.remove(slot)
        self._held[tenant] += 1
        self._held_by_call[tenant, call] += 1
        self._callers[slot] = tenant, call
        self.running[slot] = request
        return Admission(request, slot)

    def _may_run(self, tenant: str | None, call: str | None) -> bool:
        """Return whether a free slot may go to this call."""
        if len(self._free) > 1 or self._slots == 1 or tenant is call is None:
            return True
        num_slots = self._held_by_call[None, call] if tenant is None else self._held[tenant]
        return 2 * num_slots < self._slots

    def release(self, slot: int) -> None:
        """Free the slot of a finished request."""
        del self.running[slot]
        caller = self._callers.pop(slot)
        self._held[caller[0]] -= 1
        self._held_by_call[caller] -= 1
        self._held += Counter()  # drops tenants that hold none
        self._held_by_call += Counter()
        self._free.add(slot)


@lru_cache(maxsize=4096)
def plan_chunks(num_tokens: int, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Return bucket lengths that cover `num_tokens` with little padding.

    For 100 tokens, (64, 256) gives (64, 64). All chunks but the last are full. Empty for 0 tokens.
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
    """Chunks that one program computes: tokens `first` to `end` of each prompt."""

    bucket: int  # length that they are padded to
    chunks: tuple[tuple[int, int, int], ...]  # (prompt, first, end)


def row_counts(bucket: int, tokens: int, most: int) -> tuple[int, ...]:
    """Return the batch sizes for chunks of this bucket: 32 gives 1, 4, 16 for up to 512 tokens."""
    counts = [1]
    while (more := 4 * counts[-1]) <= most and more * bucket <= tokens:
        counts.append(more)
    return tuple(counts)


def plan_prefill(
    lengths: Sequence[int], buckets: tuple[int, ...], counts: Mapping[int, tuple[int, ...]]
) -> Iterator[ChunkBatch]:
    """Yield batches with all chunks of prompts of these lengths. A prompt's chunks stay in order.

    `counts` maps each bucket to the batch sizes it may have.
    """
    plans = [deque(plan_chunks(length, buckets)) for length in lengths]
    done = [0] * len(lengths)
    for bucket in sorted(buckets, reverse=True):  # a prompt's chunks start with the large ones, too
        while due := [i for i, plan in enumerate(plans) if plan and plan[0] == bucket]:
            batch = []
            for i in due[: max(count for count in counts[bucket] if count <= len(due))]:
                plans[i].popleft()
                end = min(done[i] + bucket, lengths[i])
                batch.append((i, done[i], end))
                done[i] = end
            yield ChunkBatch(bucket, tuple(batch))


@dataclass(frozen=True)
class Unfilled:
    """Part of a prompt that is still to be prefilled."""

    start: int  # number of tokens before it
    number: int  # of tokens in it


class Pace:
    """Time that prefill takes, estimated from parts of prompts that were measured.

    A chunk's work is the number of its tokens and `CHUNK_OVERHEAD`, and it doubles at a context of
    `even_context` tokens, because there attention takes as long as the rest.
    """

    def __init__(self, buckets: Sequence[int], even_context: float) -> None:
        self._buckets, self._even_context = tuple(buckets), even_context
        self._slowness: float | None = None  # seconds per token of work, None until measured

    def add(self, parts: Sequence[Unfilled], seconds: float) -> None:
        """Add a measurement. The latest count most, as other work on the machine comes and goes.

        `seconds` may be below 0, as loops that share programs also share the time of compiling.
        """
        measured = max(seconds, 0.0) / max(sum(map(self._work, parts)), 1.0)
        self._slowness = measured if self._slowness is None else (self._slowness + measured) / 2

    def take(self, prompts: Sequence[Unfilled], seconds: float) -> list[Unfilled]:
        """Return the first parts of the first prompts, as many as fit in the time.

        A part is the whole prompt or whole chunks of it. Before the first measurement it is the
        shortest chunk of one prompt.
        """
        parts: list[Unfilled] = []
        for prompt in prompts:
            part = self._fitting(prompt, seconds)
            if prompt.number and not part.number:
                break
            parts.append(part)
            if part.number < prompt.number or (part.number and self._slowness is None):
                break
            seconds -= self._seconds(part)
        return parts

    def least(self, prompt: Unfilled) -> Unfilled:
        """Return the first chunk of a prompt, as short as can be."""
        return self._start(prompt, self._buckets[0])

    def _fitting(self, prompt: Unfilled, seconds: float) -> Unfilled:
        """Return as much of a prompt as fits in the time."""
        if self._slowness is None:
            return self.least(prompt)
        if self._seconds(prompt) <= seconds:
            return prompt
        number = 0
        for bucket in reversed(self._buckets):
            while (more := number + bucket) < prompt.number and (
                self._seconds(self._start(prompt, more)) <= seconds
            ):
                number = more
        return self._start(prompt, number)

    def _start(self, prompt: Unfilled, number: int) -> Unfilled:
        return Unfilled(prompt.start, min(number, prompt.number))

    def _seconds(self, part: Unfilled) -> float:
        return (self._slowness or 0.0) * self._work(part)

    def _work(self, part: Unfilled) -> float:
        plan = plan_chunks(part.number, self._buckets)
        middle = part.start + part.number / 2
        return (sum(plan) + CHUNK_OVERHEAD * len(plan)) * (1 + middle / self._even_context)
