"""Client of an OTLP collector: OpenTelemetry's exporter, with bounds on what the collector answers.

The SDK and the exporter are imported when a client is made.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import is_installed
from lightning_jax.system.descriptors import causes
from lightning_jax.system.text import in_one_line
from lightning_jax.traces.config import ENDPOINTS, FROM_ENVIRONMENT, TracesConfig
from lightning_jax.traces.tree import from_gateway
from lightning_jax.types import Span

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
SERVICE = "lightning_jax"
RUN = "lightning.run"  # resource attribute
MAX_ANSWER = 2**16  # bytes that are read of an answer
READ_S = 5.0  # for an answer's body


def check_traces(config: TracesConfig) -> None:
    """Raise ConfigError if traces are to be exported and the exporter or the address is missing."""
    if config.export is None:
        return
    if not is_installed(EXPORTER):
        raise ConfigError.not_installed(
            "traces.export",
            "traces.export needs OpenTelemetry's OTLP exporter, which is not installed; run "
            "`pip install 'lightning-jax[otlp]'`, or leave traces.export out.",
        )
    if config.export == FROM_ENVIRONMENT and not any(map(os.environ.get, ENDPOINTS)):
        raise ConfigError.missing(
            "traces.export",
            f"traces.export is env, and {' and '.join(ENDPOINTS)} are not set; set one of them, or "
            "traces.export to the URL of the collector.",
        )


@dataclass
class Answer:
    """Last answer of the collector, as far as it was read."""

    status: int | None = None
    error: Exception | None = None  # there was none
    body: bytes = b""
    log: list[str] = field(default_factory=list)  # messages of the exporter


class OtlpClient:
    """Exporter to one collector. `send` is for one thread; any thread may call `close`."""

    def __init__(self, endpoint: str | None, headers: Mapping[str, str], run: str) -> None:
        """`endpoint` None: the variables name it. `run` is the name of the run."""
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._answer = Answer()
        self._logger = logging.getLogger(trace_exporter.__name__)
        self._exporter = trace_exporter.OTLPSpanExporter(
            endpoint=endpoint,
            headers=dict(headers) or None,
            session=_make_session(self._answer),
        )
        resource = Resource.create()
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE}))
        self._resource = resource.merge(Resource({RUN: run}))
        self._scope = InstrumentationScope(SERVICE)

    def send(self, spans: Sequence[Span]) -> tuple[int, str]:
        """Return (number of spans that the collector took, why it did not take the others).

        Retry as the exporter does, within OTEL_EXPORTER_OTLP_TIMEOUT.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._answer.status, self._answer.error, self._answer.body = None, None, b""
        with _uninstrumented(), self._kept_log():
            result = self._exporter.export([self._readable(span) for span in spans])
        status = self._answer.status
        if result is not SpanExportResult.SUCCESS or status is None or status >= 300:
            answered = None if status is None else f"it answered with status {status}"
            failure = self._answer.error and _what_failed(self._answer.error)
            return 0, in_one_line(answered or failure or ", ".join(self._answer.log))
        return self._num_accepted(len(spans))

    def close(self) -> None:
        """End a wait before a retry, and close connections."""
        with self._kept_log():
            self._exporter.shutdown()

    def _num_accepted(self, number: int) -> tuple[int, str]:
        """Return like `send`, from an answer that may reject some of this many spans."""
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceResponse,
        )

        try:
            partial = ExportTraceServiceResponse.FromString(self._answer.body).partial_success
        except DecodeError:  # not protobuf, and with a status that says that all is well
            return number, ""
        num_rejected = min(max(partial.rejected_spans, 0), number)
        reason = in_one_line(partial.error_message) or "rejected" if num_rejected else ""
        return number - num_rejected, reason

    @contextmanager
    def _kept_log(self) -> Iterator[None]:
        """Keep what the exporter logs in this thread, which we log once and with a count.

        An agent's exporter of the same class logs as before.
        """
        answer, thread = self._answer, threading.get_ident()
        answer.log = []

        def is_of_others(record: logging.LogRecord) -> bool:
            if record.thread == thread:
                answer.log.append(record.getMessage())
            return record.thread != thread

        self._logger.addFilter(is_of_others)
        try:
            yield
        finally:
            self._logger.removeFilter(is_of_others)

    def _readable(self, span: Span) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        def context(span_id: str) -> Any:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(int(span.trace_id, 16), int(span_id, 16), False, flags)

        failed = span.error is not None
        return ReadableSpan(
            name=clean(span.name),
            context=context(span.span_id),
            parent=context(span.parent_span_id) if span.parent_span_id else None,
            resource=self._resource,
            attributes={clean(str(key)): clean(value) for key, value in span.attributes.items()},
            kind=SpanKind.CLIENT if from_gateway(span) else SpanKind.INTERNAL,
            instrumentation_scope=self._scope,
            status=Status(StatusCode.ERROR, clean(span.error)) if failed else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
        )


def clean(value: Any) -> Any:
    """Return a value that protobuf takes: valid Unicode, integers of 64 bits, and no None."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode("utf-8")
        case None:
            return ""
        case bool():
            return value
        case int():
            return value if -(2**63) <= value < 2**63 else float(min(max(value, -1e308), 1e308))
        case list() | tuple():
            return tuple(map(clean, value))
        case Mapping():
            return {clean(str(key)): clean(item) for key, item in value.items()}
    return value


def _what_failed(error: Exception) -> str:
    """Return the address and the first cause, such as "127.0.0.1:4318: Connection refused"."""
    *_, first = causes(error)
    text = (isinstance(first, OSError) and first.strerror) or str(first) or type(first).__name__
    request = getattr(error, "request", None)  # of errors of `requests`
    return text if request is None else f"{urlsplit(request.url).netloc}: {text}"


def _make_session(answer: Answer) -> Any:
    """Return an HTTP session that follows no redirect and reads a bounded part of each answer."""
    import requests

    class Session(requests.Session):
        def send(self, request: Any, **kwargs: Any) -> Any:
            try:
                response = super().send(request, **(kwargs | {"stream": True}))
            except Exception as error:
                answer.error = error
                raise
            answer.status, answer.body = response.status_code, _read(response.raw)
            response.close()
            return response

    session = Session()
    session.max_redirects = 0
    return session


def _read(raw: Any) -> bytes:
    body, deadline = b"", time.monotonic() + READ_S
    while len(body) < MAX_ANSWER and time.monotonic() < deadline:
        part = raw.read1(MAX_ANSWER - len(body), decode_content=True)
        if not part:
            break
        body += part
    return body


@contextmanager
def _uninstrumented() -> Iterator[None]:
    """Keep instrumentation of HTTP clients, an agent's too, from tracing the block."""
    from opentelemetry import context

    key = context._SUPPRESS_INSTRUMENTATION_KEY
    token = context.attach(context.set_value(key, True))
    try:
        yield
    finally:
        context.detach(token)
