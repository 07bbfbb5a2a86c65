"""OpenTelemetry tracer that writes spans to the Store as soon as they end.

It is separate from the process's global provider, sampler and exporters, which stay as the agent's
own instrumentation set them.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as OpenSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lightning_jax.errors import InvalidValue
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.types import Span

P = ParamSpec("P")
T = TypeVar("T")


def make_tracer(store: Store) -> trace.Tracer:
    """Return a tracer that writes every ended span to `store`, whatever limits OTEL_* variables
    set.

    Raise ValueError if they disable the SDK, because training needs spans.
    """
    unlimited = SpanLimits.UNSET
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource({"service.name": "lightning_jax"}),
        shutdown_on_exit=False,
        id_generator=_IDS,
        span_limits=SpanLimits(
            max_attributes=unlimited,
            max_span_attributes=unlimited,
            max_attribute_length=unlimited,
            max_span_attribute_length=unlimited,
        ),
        meter_provider=NoOpMeterProvider(),
    )
    provider.add_span_processor(StoreSpanProcessor(store))
    tracer = provider.get_tracer("lightning_jax")
    if isinstance(tracer, trace.NoOpTracer):
        raise InvalidValue(
            "OTEL_SDK_DISABLED is true, but training needs spans; unset it.",
            reason="conflict",
            key="OTEL_SDK_DISABLED",
        )
    return tracer


class StoreSpanProcessor(SpanProcessor):
    """Processor that writes each span to the Store as it ends. The code that ends it gets
    StoreErrors.

    A span gets its sequence number when it starts. The choices of a call share the call's number.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def on_start(self, span: OpenSpan, parent_context: Context | None = None) -> None:
        sequence = None
        if attributes.CHOICE_INDEX in (span.attributes or {}):
            call = trace.get_current_span(parent_context)
            call_attributes = call.attributes if isinstance(call, ReadableSpan) else None
            sequence = (call_attributes or {}).get(attributes.SEQUENCE)
        if sequence is None:
            sequence = self._store.next_sequence()
        span.set_attribute(attributes.SEQUENCE, sequence)

    def on_end(self, span: ReadableSpan) -> None:
        rollout_id = (span.attributes or {}).get(attributes.ROLLOUT_ID)
        self._store.add_span(None if rollout_id is None else str(rollout_id), to_span(span))


@dataclass(frozen=True)
class Recorder:
    """Tracer for an event loop. Spans start on the loop and end on the store's thread."""

    tracer: trace.Tracer
    store: Store | None = None

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that ends spans, and return once they are stored.

        Raise StoreError if they cannot be written.
        """
        if self.store is None:
            return function(*args, **kwargs)
        return await self.store.in_order(function, *args, **kwargs)


class JsonFloats(str):
    """Numbers for the tokens of a call, as a span attribute for `make_tracer`.

    To OpenTelemetry they are a short string. It would check each item of a sequence, which for a
    long prompt takes more time than the rest of a call. The Store gets the numbers.
    """

    numbers: tuple[Any, ...]

    def __new__(cls, numbers: Sequence[Any]) -> "JsonFloats":
        made = super().__new__(cls, f"{len(numbers)} numbers")
        made.numbers = tuple(numbers)
        return made


class _Ids(IdGenerator):
    """Ids from the system's entropy, because agents may seed `random` and then ids would repeat."""

    def generate_span_id(self) -> int:
        return secrets.randbelow(2**64 - 1) + 1

    def generate_trace_id(self) -> int:
        return secrets.randbelow(2**128 - 1) + 1


_IDS = _Ids()


def to_span(span: ReadableSpan) -> Span:
    """Return an ended OpenTelemetry span as our record, with ids in hex as W3C writes them.

    If the clock was set back while the span ran, it ends at its start.
    """
    context = span.get_span_context()
    assert context is not None, f"span {span.name!r} has no context"
    assert span.start_time is not None and span.end_time is not None, f"span {span.name!r} is open"
    values: dict[str, Any] = {
        name: value.numbers if isinstance(value, JsonFloats) else value
        for name, value in (span.attributes or {}).items()
    }
    sequence = values.pop(attributes.SEQUENCE, None)
    return Span(
        trace_id=trace.format_trace_id(context.trace_id),
        span_id=trace.format_span_id(context.span_id),
        parent_span_id=trace.format_span_id(span.parent.span_id) if span.parent else None,
        name=span.name,
        start_ns=span.start_time,
        end_ns=max(span.start_time, span.end_time),
        attributes=values,
        error=(span.status.description or "")
        if span.status.status_code is StatusCode.ERROR
        else None,
        sequence=sequence,
    )


@dataclass(frozen=True)
class Root:
    """Ids of a rollout's root span, known before it ends so that other spans can go below it.

    They are random, so they cannot be guessed from the rollout's name.
    """

    trace_id: str = field(default_factory=lambda: trace.format_trace_id(_IDS.generate_trace_id()))
    span_id: str = field(default_factory=lambda: trace.format_span_id(_IDS.generate_span_id()))
    sequence: int | None = None  # sequence number in the store

    @property
    def context(self) -> Context:
        """Context in which a new span becomes a child of the root."""
        root = trace.SpanContext(
            trace_id=int(self.trace_id, 16),
            span_id=int(self.span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        return trace.set_span_in_context(trace.NonRecordingSpan(root), Context())

    def span(
        self,
        rollout_id: str,
        start_ns: int,
        end_ns: int,
        values: Mapping[str, Any],
        error: str | None,
    ) -> Span:
        """Return the root span, which records the rollout as a whole."""
        return Span(
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_span_id=None,
            name="rollout",
            start_ns=start_ns,
            end_ns=max(start_ns, end_ns),
            attributes={
                attributes.OPERATION_NAME: attributes.INVOKE_AGENT,
                attributes.ROLLOUT_ID: rollout_id,
            }
            | dict(values),
            error=error,
            sequence=self.sequence,
        )


def context_of(headers: Mapping[str, str]) -> tuple[Context, str | None]:
    """Return (context, trace id) from a request's W3C traceparent. Without one, the id is None."""
    context = TraceContextTextMapPropagator().extract(headers, context=Context())
    named = trace.get_current_span(context).get_span_context()
    return context, trace.format_trace_id(named.trace_id) if named.is_valid else None


@contextmanager
def below_root(root: Root) -> Iterator[None]:
    """Make spans of this task, from any tracer, descendants of the rollout's root."""
    token = context_api.attach(root.context)
    try:
        yield
    finally:
        context_api.detach(token)


def flush_process_tracer(timeout_ms: int = 5000) -> None:
    """Flush the process's own tracer provider, if it is one from the SDK."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.force_flush(timeout_ms)


def trace_headers() -> dict[str, str]:
    """Return environment variables that let a program put its spans below this task's span.

    Return {} if there is no span.
    """
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {name.upper(): value for name, value in carrier.items()}


def child_context(span: trace.Span) -> Context:
    """Return the context in which a new span becomes a child of `span`."""
    return trace.set_span_in_context(span, Context())


def end_with_error(span: trace.Span, reason: str, message: str) -> None:
    """End the span as failed. `reason` is a short code, and `message` is one sentence."""
    span.set_attribute(attributes.ERROR_TYPE, reason)
    span.set_status(StatusCode.ERROR, message or reason)
    span.end()


def known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that are not None, because OpenTelemetry cannot hold None."""
    return {name: value for name, value in attributes.items() if value is not None}
