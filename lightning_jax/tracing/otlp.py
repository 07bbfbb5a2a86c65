"""Spans that an agent's own instrumentation sends: OTLP over HTTP, as protobuf or JSON.

What comes from an agent is not trusted to say what the policy sampled: attributes under our own
prefix are taken out of it.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.decoder import py_scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from lightning_jax.tracing import attributes as names
from lightning_jax.types import Span

OWN_PREFIX = "lightning."
MAX_CHARS = 32_768  # of one attribute; a tool may have printed megabytes
MAX_KEY_CHARS = 256
MAX_ATTRIBUTES = 1_024  # of a span; SDKs keep 128 unless told otherwise
MAX_SPAN_CHARS = 2**20  # of a span's keys and values together; a number counts as 8
MAX_SPANS = 2_048  # of one request; SDKs send 512
# Of a request in JSON, which takes ten times as long to read as protobuf.
MAX_JSON_BYTES = 4 * 2**20
MAX_JSON_VALUES = 250_000
SMALL_JSON_BYTES = 2**17  # takes C no more than a few milliseconds
PROTOBUF, JSON = "application/x-protobuf", "application/json"


@dataclass(frozen=True)
class Export:
    """What a request sent, within the limits above."""

    spans: tuple[Span, ...]
    sizes: tuple[int, ...]  # bytes of each span as the store keeps it
    num_excess: int = 0  # spans that were not read, because the request has too many
    num_dropped_attributes: int = 0  # of the spans; each span says its own number


def read_request(body: bytes, content_type: str) -> Export:
    """The spans of an export request. Raises ValueError for a body that is none.

    It may run in a thread: however large the body is, it lets other threads run.
    """
    try:
        if content_type == JSON:
            request = ExportTraceServiceRequest()
            fields = _JsonIds().converted(_load_json(body))
            json_format.ParseDict(fields, request, ignore_unknown_fields=True)
        else:
            request = ExportTraceServiceRequest.FromString(body)
    except (DecodeError, json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the body is no OTLP trace export as {content_type} ({str(error)[:200]})"
        ) from error
    spans: list[Span] = []
    num_spans = 0
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            num_spans += len(scope.spans)
            spans += map(_span, scope.spans[: MAX_SPANS - len(spans)])
    return Export(
        spans=tuple(spans),
        sizes=tuple(map(stored_size, spans)),
        num_excess=num_spans - len(spans),
        num_dropped_attributes=sum(
            span.attributes.get(names.DROPPED_ATTRIBUTES, 0) for span in spans
        ),
    )


def stored_size(span: Span) -> int:
    """Return about how many bytes the store keeps of a span."""
    attributes = json.dumps(dict(span.attributes), separators=(",", ":"), ensure_ascii=False)
    return len(attributes.encode()) + len(span.name.encode()) + len((span.error or "").encode())


def write_response(
    refused: Mapping[str, int], num_dropped_attributes: int, content_type: str
) -> bytes:
    """The answer to an export request: how many spans were refused, by reason, and how many
    attributes of the others were dropped.
    """
    response = ExportTraceServiceResponse()
    reasons = [f"{number} spans: {reason}" for reason, number in refused.items()]
    if num_dropped_attributes:
        reasons.append(f"{num_dropped_attributes} attributes were too long or too many")
    if reasons:
        response.partial_success.rejected_spans = sum(refused.values())
        response.partial_success.error_message = "; ".join(reasons)
    if content_type == JSON:
        return json_format.MessageToJson(response, indent=None).encode()
    return response.SerializeToString()


def _span(span: OtlpSpan) -> Span:
    if len(span.trace_id) != 16 or len(span.span_id) != 8:
        raise ValueError(
            f"span {span.name!r} has a trace id of {len(span.trace_id)} bytes and a span id of "
            f"{len(span.span_id)}; expected 16 and 8"
        )
    if max(span.start_time_unix_nano, span.end_time_unix_nano) >= 2**63:
        raise ValueError(f"span {span.name!r} ends after the year 2262; expected nanoseconds")
    reader = _Reader()
    values = reader.attributes(span.attributes)
    error = None
    if span.status.code == Status.STATUS_CODE_ERROR:
        thrown = _exception(span)
        error = clip(span.status.message) or str(thrown.get("exception.message", ""))
        values.setdefault(names.ERROR_TYPE, str(thrown.get("exception.type", "error")))
    if reader.num_dropped:
        values[names.DROPPED_ATTRIBUTES] = reader.num_dropped
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() or None,
        name=clip(span.name),
        start_ns=span.start_time_unix_nano,
        end_ns=max(span.end_time_unix_nano, span.start_time_unix_nano),
        attributes=values,
        error=error if error != "" else "it failed",
    )


def _exception(span: OtlpSpan) -> dict[str, Any]:
    events = [event for event in span.events if event.name == "exception"]
    return _Reader().attributes(events[-1].attributes) if events else {}


class _TooLong(Exception):
    """A span's attributes have more text than MAX_SPAN_CHARS."""


class _Reader:
    """Reads the attributes of one span, and drops those that are too long or too many."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._left = MAX_SPAN_CHARS

    def attributes(self, pairs: Sequence[KeyValue]) -> dict[str, Any]:
        """Return the attributes that are not under our own prefix."""
        found: dict[str, Any] = {}
        for place, pair in enumerate(pairs):
            if len(found) == MAX_ATTRIBUTES:
                self.num_dropped += len(pairs) - place
                break
            if pair.key.startswith(OWN_PREFIX):
                continue
            left = self._left
            try:
                if len(pair.key) > MAX_KEY_CHARS:
                    raise _TooLong
                self._take(len(pair.key))
                found[pair.key] = self._value(pair.value)
            except _TooLong:
                self.num_dropped += 1
                self._left = left
        return found

    def _value(self, value: AnyValue) -> Any:
        kind = value.WhichOneof("value")
        match kind:
            case None:
                return self._text("")
            case "string_value":
                return self._text(clip(value.string_value))
            case "bytes_value":
                return self._text(clip(value.bytes_value.hex()))
            case "array_value":
                self._take(8)
                return tuple(self._value(item) for item in value.array_value.values)
            case "kvlist_value":
                self._take(8)
                items = value.kvlist_value.values
                return {self._text(item.key): self._value(item.value) for item in items}
            case "double_value" if not math.isfinite(value.double_value):
                # JSON, as the store keeps it, has no such number.
                return self._text(str(value.double_value))
        self._take(8)
        return getattr(value, kind)

    def _text(self, text: str) -> str:
        self._take(8 + len(text))
        return text

    def _take(self, num_chars: int) -> None:
        self._left -= num_chars
        if self._left < 0:
            raise _TooLong


def clip(text: str) -> str:
    """The text, cut to MAX_CHARS with a word on how much more there was."""
    more = len(text) - MAX_CHARS
    return text if more <= 0 else f"{text[:MAX_CHARS]}... ({more} more characters)"


class _PatientDecoder(json.JSONDecoder):
    """Decodes JSON in Python. The decoder in C would keep all other threads waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_string = py_scanstring
        self.scan_once = py_make_scanner(self)


def _load_json(body: bytes) -> Any:
    if len(body) > MAX_JSON_BYTES:
        raise ValueError(
            f"it has {len(body)} bytes, and JSON may have {MAX_JSON_BYTES}. Send fewer "
            "spans at once, or protobuf"
        )
    text = body.decode()
    return json.loads(text) if len(body) <= SMALL_JSON_BYTES else _PatientDecoder().decode(text)


class _JsonIds:
    """Converts ids: OTLP's JSON writes them in hex, where protobuf's writes bytes in base64."""

    def __init__(self) -> None:
        self._num_values = 0

    def converted(self, message: Any) -> Any:
        """Return the message with ids in base64. Raises ValueError above MAX_JSON_VALUES."""
        self._num_values += 1
        if self._num_values > MAX_JSON_VALUES:
            raise ValueError(
                f"it has more than {MAX_JSON_VALUES} values. Send fewer spans at once, or protobuf"
            )
        if isinstance(message, list):
            return [self.converted(item) for item in message]
        if not isinstance(message, Mapping):
            return message
        return {
            key: base64.b64encode(bytes.fromhex(item)).decode()
            if key in ("traceId", "spanId", "parentSpanId") and isinstance(item, str)
            else self.converted(item)
            for key, item in message.items()
        }
