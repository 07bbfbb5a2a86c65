"""Interface of what records spans: the store of this process, or the way to another's."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from lightning_jax.types import Span


@runtime_checkable
class SpanSink(Protocol):
    """Destination of ended spans. Its methods are for an event loop's thread."""

    def next_sequence(self) -> int:
        """Return the next sequence number, for a span that begins now and is recorded later."""
        ...

    async def record(self, rollout_id: str | None, *spans: Span) -> None:
        """Return once the spans are stored, all or none. See `Store.add_span`.

        Raises StoreError if they cannot be.
        """
        ...

    async def record_posted(self, rollout_id: str, spans: Sequence[Span]) -> tuple[list[bool], int]:
        """Record spans whose ids a client chose. See `Store.add_posted_spans`."""
        ...
