"""Spans on their way from a sampler to the run's store.

The run takes parcels of spans, stores them, and asks for the next parcel with the receipts of the
last. A call is answered once its span has a receipt. So the store's pace is the samplers' pace, and
nothing is trained that was not recorded.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.traces._sqlite import StoreError
from lightning_jax.traces.context import SpanSink
from lightning_jax.types import Span

MAX_ITEMS = 512  # of one parcel
LINGER_S = 1.0  # an empty parcel is sent after this time, as a sign of life
SILENCE_S = 60.0  # without a request for a parcel, after which the run is lost


@dataclass(frozen=True)
class Delivery:
    """Spans of one rollout that are recorded together. `posted`: a client chose their ids."""

    number: int
    rollout_id: str | None
    spans: tuple[Span, ...]
    posted: bool = False


@dataclass(frozen=True)
class Receipt:
    """Answer to a delivery: what the store returned, or why it failed."""

    number: int
    result: Any = None
    error: str | None = None
    is_invalid: bool = False  # the spans were refused, and not the store's fault


@dataclass(frozen=True)
class Parcel:
    """Deliveries, and at that time the sampler's counters and the rollouts that are over."""

    deliveries: tuple[Delivery, ...]
    stats: dict[str, float]
    over: frozenset[str] = frozenset()  # ids of their root spans, see `Gateway.over`


class Outbox:
    """Sink of a sampler's spans, which the run empties. Use it in one event loop only.

    Once the run has been silent for `silence_s`, all deliveries fail, also later ones.
    """

    def __init__(self, first_sequence: int = 1, *, silence_s: float = SILENCE_S) -> None:
        self._sequence = itertools.count(first_sequence)
        self._numbers = itertools.count()
        self._queue: deque[Delivery] = deque()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._changed = asyncio.Event()
        self._silence_s = silence_s
        self._heard = time.monotonic()
        self._num_taking = 0
        self._loss: str | None = None
        self._watching: asyncio.Task[None] | None = None

    def next_sequence(self) -> int:
        """Return the next sequence number. All spans of a rollout have one sampler's numbers."""
        return next(self._sequence)

    async def record(self, rollout_id: str | None, *spans: Span) -> None:
        """Return once the run has stored the spans. Raises StoreError if it did not."""
        await self._deliver(rollout_id, spans)

    async def record_posted(self, rollout_id: str, spans: Sequence[Span]) -> tuple[list[bool], int]:
        """Return the result of `Store.add_posted_spans` in the run's process."""
        are_new, num_taken = await self._deliver(rollout_id, spans, posted=True)
        return list(are_new), num_taken

    async def take(self, receipts: Sequence[Receipt]) -> tuple[Delivery, ...]:
        """Accept receipts, and return what is to be stored next, or () after LINGER_S.

        Raises StoreError if the run was silent for too long before.
        """
        self._check()
        for receipt in receipts:
            self._resolve(receipt)
        self._num_taking += 1
        try:
            if not self._queue:
                self._changed.clear()
                try:
                    async with asyncio.timeout(LINGER_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            self._num_taking -= 1
            self._heard = time.monotonic()
        number = min(len(self._queue), MAX_ITEMS)
        return tuple(self._queue.popleft() for _ in range(number))

    async def empty(self) -> None:
        """Wait until all that was recorded so far has a receipt."""
        await asyncio.gather(*self._waiting.values(), return_exceptions=True)

    def close(self) -> None:
        """Fail all deliveries, also later ones."""
        self._fail("the sampler was stopped before the run had stored the spans")
        if self._watching:
            self._watching.cancel()

    async def _deliver(
        self, rollout_id: str | None, spans: Iterable[Span], *, posted: bool = False
    ) -> Any:
        self._check()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        numbered = tuple(
            replace(span, sequence=self.next_sequence()) if span.sequence is None else span
            for span in spans
        )
        delivery = Delivery(next(self._numbers), rollout_id, numbered, posted)
        receipt = self._waiting[delivery.number] = asyncio.get_running_loop().create_future()
        self._queue.append(delivery)
        self._changed.set()
        return await asyncio.shield(receipt)  # as in the store, it is recorded all the same

    def _resolve(self, receipt: Receipt) -> None:
        waiting = self._waiting.pop(receipt.number)
        if receipt.error is None:
            waiting.set_result(receipt.result)
            return
        kind = InvalidValue if receipt.is_invalid else StoreError
        waiting.set_exception(kind(receipt.error, reason="not_recorded"))
        waiting.exception()  # its caller may be gone

    async def _watch(self) -> None:
        """Fail all deliveries once the run is silent for too long."""
        while True:
            await asyncio.sleep(self._silence_s / 10)
            silent_s = time.monotonic() - self._heard
            if not self._num_taking and silent_s > self._silence_s:
                self._fail(f"the run has asked for no spans for {silent_s:.0f} s")
                return

    def _fail(self, loss: str) -> None:
        self._loss = self._loss or loss
        self._queue.clear()
        waiting, self._waiting = self._waiting, {}
        for receipt in waiting.values():
            if not receipt.done():
                receipt.set_exception(self._error())
                receipt.exception()

    def _check(self) -> None:
        if self._loss:
            raise self._error()

    def _error(self) -> StoreError:
        return StoreError(f"{self._loss}; the rollout is tried again.", reason="undelivered")


async def store_parcel(sink: SpanSink, deliveries: Sequence[Delivery]) -> list[Receipt]:
    """Store the deliveries of a parcel and return their receipts."""
    return list(await asyncio.gather(*(_store(sink, delivery) for delivery in deliveries)))


async def _store(sink: SpanSink, delivery: Delivery) -> Receipt:
    try:
        if delivery.posted:
            assert delivery.rollout_id is not None, "spans are posted for a rollout"
            result = await sink.record_posted(delivery.rollout_id, delivery.spans)
        else:
            result = await sink.record(delivery.rollout_id, *delivery.spans)
    except StoreError as error:
        return Receipt(delivery.number, error=str(error))
    except InvalidValue as error:
        return Receipt(delivery.number, error=str(error), is_invalid=True)
    return Receipt(delivery.number, result)
