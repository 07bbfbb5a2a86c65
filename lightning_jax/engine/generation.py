"""Asyncio handle of one request (chunks, result, cancellation) and the errors of serving."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from lightning_jax.engine.response import Chunk, Response, rest_of
from lightning_jax.engine.types import Completion
from lightning_jax.errors import Coded, InvalidValue


class EngineError(Coded, RuntimeError):
    """Failure or shutdown of the engine before the response was complete."""


class PromptTooLong(InvalidValue):
    """Prompt that leaves no room for a response in a slot.

    Clients recognize it by the words of OpenAI's message and of Anthropic's.
    """

    def __init__(self, num_tokens: int, max_len: int, *, at_least: bool = False) -> None:
        self.num_tokens = num_tokens
        number = f"at least {num_tokens}" if at_least else num_tokens
        super().__init__(
            f"This model's maximum context length is {max_len} tokens, but the prompt is too long: "
            f"{number} tokens > {max_len - 1} maximum, which leaves 1 for the response. Shorten it "
            "or, if the model has more positions, raise serve.max_len (--max-len of lightning-jax "
            "serve).",
            reason="too_long",
            key="prompt",
        )


class QueueFull(Coded, RuntimeError):
    """Refusal of a request because too many are waiting."""


class Draining(Coded, RuntimeError):
    """Refusal of a request because the engine only finishes the ones it has."""


class Generation:
    """Handle of one running request. Only `cancel` may be called off the event loop's thread.

    Iterate over it for chunks, await `result()`, or do both. The engine cuts chunks once
    somebody iterates. The first chunk has all tokens so far.
    """

    def __init__(self, cancel: "Callable[[Generation], None]") -> None:
        self.event_loop = asyncio.get_running_loop()
        self._cancel = cancel
        self.is_followed = False  # somebody iterates; the engine's thread reads this
        self._chunks: deque[Chunk] = deque()
        self._num_tokens = self._num_chars = 0  # in chunks so far
        self._outcome: Completion | EngineError | None = None
        self._changed = asyncio.Event()
        self._started = asyncio.Event()
        self._finished = asyncio.Event()

    def __aiter__(self) -> "Generation":
        self.is_followed = True
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk. Raises EngineError after the last one if the engine failed."""
        self.is_followed = True
        while not self._chunks:
            if isinstance(self._outcome, EngineError):
                raise self._outcome
            if self._outcome is not None:
                if self._num_tokens == len(self._outcome.token_ids):
                    raise StopAsyncIteration
                self._add(rest_of(self._outcome, self._num_tokens, self._num_chars))
                break
            self._changed.clear()
            await self._changed.wait()
        return self._chunks.popleft()

    async def started(self) -> None:
        """Wait for the first token or the end. Raises EngineError if the engine failed."""
        await self._started.wait()
        if isinstance(self._outcome, EngineError):
            raise self._outcome

    async def result(self) -> Completion:
        """Wait for the whole response and return it. Raises EngineError if the engine failed."""
        await self._finished.wait()
        if isinstance(self._outcome, Completion):
            return self._outcome
        assert self._outcome is not None, "a finished generation has an outcome"
        raise self._outcome

    def cancel(self) -> None:
        """Stop the request after the steps that have started. May be called from any thread.

        `result()` then returns the partial response.
        """
        self._cancel(self)

    def receive(self, chunk: Chunk | None, outcome: Completion | EngineError | None) -> None:
        """Record a first token, a chunk or the outcome, for the engine. The first outcome counts.

        The outcome may have tokens that no chunk had.
        """
        if self._outcome is not None:
            return
        if chunk is not None:
            self._add(chunk)
        self._started.set()
        if outcome is not None:
            self._outcome = outcome
            self._finished.set()
        self._changed.set()

    def _add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._num_tokens += len(chunk.token_ids)
        self._num_chars += len(chunk.text)


@dataclass(frozen=True)
class ChunkDelivery:
    """Arguments of one `Generation.receive` call, on its way to the event loop's thread."""

    generation: Generation
    chunk: Chunk | None
    outcome: Completion | EngineError | None


def news_of(generation: Generation, response: Response) -> ChunkDelivery | None:
    """Return what a token of an open response is to its listeners, None if they wait for its end.

    Everybody hears of the first one.
    """
    if generation.is_followed:
        return ChunkDelivery(generation, response.chunk(), None)
    return ChunkDelivery(generation, None, None) if len(response) == 1 else None


def deliver(deliveries: Iterable[ChunkDelivery]) -> None:
    """Deliver all of them with one wake-up per event loop. May be called from any thread."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[ChunkDelivery]] = defaultdict(list)
    for delivery in deliveries:
        by_loop[delivery.generation.event_loop].append(delivery)
    for event_loop, batch in by_loop.items():
        # RuntimeError: the event loop is closed, so nothing is waiting on it.
        with suppress(RuntimeError):
            event_loop.call_soon_threadsafe(_receive_all, batch)


def _receive_all(batch: list[ChunkDelivery]) -> None:
    for delivery in batch:
        delivery.generation.receive(delivery.chunk, delivery.outcome)
