"""Spans that have begun, their place among the agent's own spans, and what records them.

Only trace contexts cross this border: in with a request, out to the agent. The process's own tracer
provider, sampler and exporters stay as the agent's instrumentation set them.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lightning_jax.traces import attributes
from lightning_jax.types import Span


def _new_span_id() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True)
class OpenSpan:
    """Span that has begun. Other spans can go below it before it ends.

    Ids come from the system's entropy: agents cannot guess them, and ids do not repeat if an agent
    seeds `random`.
    """

    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    parent_span_id: str | None = None
    sequence: int | None = None  # order of its start among the store's spans
    span_id: str = field(default_factory=_new_span_id)
    start_ns: int = field(default_factory=time.time_ns)

    def child(self) -> "OpenSpan":
        """Return a part of this span, which began with it."""
        return replace(self, parent_span_id=self.span_id, span_id=_new_span_id())

    def end(self, name: str, values: Mapping[str, Any], error: str | None = None) -> Span:
        """Return the ended span, without attributes that are None.

        If the clock was set back since its start, it ends at its start.
        """
        return Span(
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_span_id=self.parent_span_id,
            name=name,
            start_ns=self.start_ns,
            end_ns=max(self.start_ns, time.time_ns()),
            attributes={key: value for key, value in values.items() if value is not None},
            error=error,
            sequence=self.sequence,
        )

    def fail(self, name: str, values: Mapping[str, Any], reason: str, message: str) -> Span:
        """Return the span as failed. `reason` is a short code, and `message` is one sentence."""
        return self.end(name, {**values, attributes.ERROR_TYPE: reason}, message or reason)


def parent_in(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the (trace id, span id) of a request's W3C traceparent, or None without one."""
    context = TraceContextTextMapPropagator().extract(headers, context=Context())
    named = trace.get_current_span(context).get_span_context()
    if not named.is_valid:
        return None
    return trace.format_trace_id(named.trace_id), trace.format_span_id(named.span_id)


@contextmanager
def below(span: OpenSpan) -> Iterator[None]:
    """Make spans of this task, from any tracer, descendants of the span."""
    parent = trace.SpanContext(
        trace_id=int(span.trace_id, 16),
        span_id=int(span.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    context = trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
    token = context_api.attach(context)
    try:
        yield
    finally:
        context_api.detach(token)


def trace_headers() -> dict[str, str]:
    """Return environment variables that let a program put its spans below this task's span.

    Return {} if there is no span.
    """
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {name.upper(): value for name, value in carrier.items()}


def flush_process_tracer(timeout_ms: int = 5000) -> None:
    """Export the spans that the process's own tracer provider still holds, if it can."""
    flush = getattr(trace.get_tracer_provider(), "force_flush", None)
    if flush is not None:
        flush(timeout_ms)


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
