"""Bookkeeping of open requests and admission checks, shared by the loops over slots."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeVar

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.generation import (
    ChunkDelivery,
    Draining,
    EngineError,
    Generation,
    PromptTooLong,
    QueueFull,
    deliver,
)
from lightning_jax.engine.response import Response, TimeLimit
from lightning_jax.engine.types import LONGEST_WAIT, SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer

Request = TypeVar("Request")
LoopStatus = Literal["ok", "draining", "failed"]  # a closed loop is "failed", too


def join_statuses(statuses: Iterable[LoopStatus]) -> LoopStatus:
    """Return "ok" if all statuses are, else the first other one: then some requests are refused."""
    for status in statuses:
        if status != "ok":
            return status
    return "ok"


def join_stats(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of several loops' counters, and the longest of their waits."""
    return {
        name: (max if name == LONGEST_WAIT else sum)(one.get(name, 0.0) for one in stats)
        for name in {name: None for one in stats for name in one}
    }


class Intake(Generic[Request]):
    """Open requests by generation. Every method may be called from any thread."""

    def __init__(self, *, slots: int, max_queue: int, max_len: int, vocab_size: int) -> None:
        self._slots, self._max_queue = slots, max_queue
        self._max_len, self._vocab_size = max_len, vocab_size
        self._open: dict[Generation, tuple[Request, str | None]] = {}  # with their tenants
        self._counts: Counter[str | None] = Counter()  # open requests by tenant
        self._lock = threading.RLock()
        self._empty = threading.Event()
        self._empty.set()
        self._draining = False
        self.failure: EngineError | None = None

    def __len__(self) -> int:
        return len(self._open)

    def get(self, generation: Generation) -> Request | None:
        """Return the open request, or None if it has ended."""
        return self._open.get(generation, (None, None))[0]

    @property
    def status(self) -> LoopStatus:
        """Status, which is "ok" if new requests are accepted, regardless of a full queue."""
        if self.failure:
            return "failed"
        return "draining" if self._draining else "ok"

    def check_prompt(self, prompt: tuple[int, ...]) -> None:
        """Check that the prompt is valid and leaves room for a response.

        Raises PromptTooLong if it leaves no room, and ValueError if it is empty or has an unknown
        token.
        """
        if not prompt:
            raise InvalidValue.empty("prompt", "the prompt has no tokens; send at least one")
        if len(prompt) >= self._max_len:
            raise PromptTooLong(len(prompt), self._max_len)
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise InvalidValue.out_of_range(
                "prompt",
                f"the prompt has a token id outside 0..{self._vocab_size - 1}; encode it with the "
                "model's own tokenizer",
            )

    def add(self, generation: Generation, request: Request, tenant: str | None = None) -> None:
        """Open a request. Raises EngineError after a failure, Draining or QueueFull.

        A full queue refuses only tenants that already have their share of it. So one tenant's flood
        never blocks the others, and at most twice `max_queue` requests wait.
        """
        with self._lock:
            self.check_failure()
            if self._draining:
                raise Draining(
                    "the engine is draining; send the request to another one",
                    reason="draining",
                )
            room = self._slots + self._max_queue
            num_open = self._counts[tenant]
            others = len(self._counts) - (num_open > 0)
            if len(self._open) >= room and num_open >= max(1, room // (others + 1)):
                raise QueueFull(
                    f"the queue is full: {len(self._open)} requests are open, {num_open} of them "
                    "from this caller (limit: serve.slots + serve.max_queue). Retry later.",
                    reason="queue_full",
                )
            self._open[generation] = request, tenant
            self._counts[tenant] += 1
            self._empty.clear()

    def check_failure(self) -> None:
        """Raise EngineError if the engine has failed or was closed."""
        if self.failure:
            raise EngineError(str(self.failure), reason=self.failure.reason) from self.failure

    def remove(self, generations: Iterable[Generation]) -> None:
        """Remove requests that have ended."""
        with self._lock:
            for generation in generations:
                if generation in self._open:
                    _, tenant = self._open.pop(generation)
                    self._counts[tenant] -= 1
            self._counts += Counter()  # drops tenants without open requests
            if not self._open:
                self._empty.set()

    def fail(self, error: EngineError) -> None:
        """End every open request with `error`, and refuse later ones. The first failure stays."""
        with self._lock:
            self.failure = self.failure or error
            failed = [ChunkDelivery(generation, None, self.failure) for generation in self._open]
            self.remove(list(self._open))
        deliver(failed)

    async def drain(self) -> None:
        """Refuse new requests, and return when none is open."""
        with self._lock:
            self._draining = True
        await asyncio.to_thread(self._empty.wait)


class SlotLoop(Generic[Request]):
    """Base of a loop over the slots of one device or mesh, with its open requests."""

    def __init__(self, programs: SlotPrograms, tokenizer: Tokenizer, serve: ServeConfig) -> None:
        self._programs, self._tokenizer = programs, tokenizer
        self._intake: Intake[Request] = Intake(
            slots=programs.num_slots,
            max_queue=serve.max_queue,
            max_len=programs.max_len,
            vocab_size=programs.config.shape.vocab_size,
        )

    @property
    def status(self) -> LoopStatus:
        """Status, which is "ok" if new requests are accepted, regardless of a full queue.

        Requests submitted before `start` wait for it.
        """
        return self._intake.status

    @property
    def num_slots(self) -> int:
        """Number of requests decoded at once."""
        return self._programs.num_slots

    @property
    def num_open(self) -> int:
        """Number of requests running or waiting."""
        return len(self._intake)

    async def drain(self) -> None:
        """Refuse new requests, and return when none is open."""
        await self._intake.drain()

    def _respond(
        self, prompt: tuple[int, ...], sampling: SamplingParams, time_limit: TimeLimit | None
    ) -> Response:
        """Return the response to a prompt, still empty. Raises the errors of `check_prompt`."""
        self._intake.check_prompt(prompt)
        limit = min(sampling.max_tokens, self._programs.max_len - len(prompt))
        context = prompt[-1:] if sampling.continues_text else ()
        decoder = StreamDecoder(self._tokenizer, sampling.shown_ids, context)
        return Response(decoder, self._tokenizer.eos_ids, sampling, limit, time_limit)
