"""The asyncio side of one request: an iterator of chunks, a result, a way to cancel it, errors."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from lightning_jax.serve.response import Chunk
from lightning_jax.types import Coded, Completion, InvalidValue


class EngineError(Coded, RuntimeError):
    """The engine failed or was closed; the request got no full response."""


class PromptTooLong(InvalidValue):
    """The prompt leaves no room for a response in a slot."""


class QueueFull(Coded, RuntimeError):
    """Too many requests wait already."""


class Draining(Coded, RuntimeError):
    """The engine finishes what it has and takes no more."""


class Generation:
    """One request that runs. Only `cancel` may be called off the event loop's thread.

    Iterate over it for chunks, or await `result()`, or both.
    """

    def __init__(self, cancel: "Callable[[Generation], None]") -> None:
        self.event_loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._chunks: deque[Chunk] = deque()
        self._outcome: Completion | EngineError | None = None
        self._changed = asyncio.Event()
        self._finished = asyncio.Event()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk. Raises EngineError after the last one if the engine failed."""
        while not self._chunks:
            if isinstance(self._outcome, EngineError):
                raise self._outcome
            if self._outcome is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._chunks.popleft()

    async def result(self) -> Completion:
        """The whole response, when it is finished. Raises EngineError if the engine failed."""
        await self._finished.wait()
        if isinstance(self._outcome, Completion):
            return self._outcome
        assert self._outcome is not None, "a finished generation has an outcome"
        raise self._outcome

    def cancel(self) -> None:
        """Stops the request within a step; `result()` then gives what there is. From any thread."""
        self._cancel(self)

    def receive(self, chunk: Chunk | None, outcome: Completion | EngineError | None) -> None:
        """For the engine's side: what a step added, and how it ended. The first outcome counts."""
        if self._outcome is not None:
            return
        if chunk is not None:
            self._chunks.append(chunk)
        if outcome is not None:
            self._outcome = outcome
            self._finished.set()
        self._changed.set()


@dataclass(frozen=True)
class Delivery:
    """One call of `Generation.receive`, on its way to the event loop's thread."""

    generation: Generation
    chunk: Chunk | None
    outcome: Completion | EngineError | None


def deliver(deliveries: Iterable[Delivery]) -> None:
    """Hands all of them over with one wake-up per event loop, whichever thread this is."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        by_loop[delivery.generation.event_loop].append(delivery)
    for event_loop, batch in by_loop.items():
        # RuntimeError: the loop is closed, so nobody waits on it any more.
        with suppress(RuntimeError):
            event_loop.call_soon_threadsafe(_receive_all, batch)


def _receive_all(batch: list[Delivery]) -> None:
    for delivery in batch:
        delivery.generation.receive(delivery.chunk, delivery.outcome)
