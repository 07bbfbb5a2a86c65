"""Spans that an agent's own instrumentation sends: OTLP over HTTP, as protobuf or JSON.

What comes from an agent is not trusted to say what the policy sampled: attributes under our own
prefix are taken out of it.
"""

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
MAX_SPANS = 10_000  # of one export
MAX_SPAN_BYTES = 2**20  # of one span as protobuf
# Field numbers of resource_spans, scope_spans and spans.
_TO_SPANS = (1, 2, 2)
PROTOBUF, JSON = "application/x-protobuf", "application/json"


class TooManySpans(ValueError):
    """An export has more spans than are taken at once."""


def read_request(
    body: bytes | Mapping[str, Any],
    max_spans: int = MAX_SPANS,
    max_span_bytes: int = MAX_SPAN_BYTES,
) -> tuple[list[Span], int]:
    """Return the spans of an export request, protobuf or JSON, and how many were too large to read.

    Raises ValueError for a body that is none, and TooManySpans, which is one.
    """
    kind = PROTOBUF if isinstance(body, bytes) else JSON
    spans: list[OtlpSpan] = []
    num_large = 0
    try:
        if isinstance(body, bytes):
            # One span at a time: a parser in C does not let go of the interpreter in between.
            for raw in _nested(memoryview(body), _TO_SPANS):
                _check_number(len(spans) + num_large, max_spans)
                if len(raw) > max_span_bytes:
                    num_large += 1
                else:
                    spans.append(OtlpSpan.FromString(bytes(raw)))
        else:
            request = ExportTraceServiceRequest()
            json_format.ParseDict(_with_base64_ids(body), request, ignore_unknown_fields=True)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans += scope.spans
            _check_number(len(spans) - 1, max_spans)
    except TooManySpans:
        raise
    except (DecodeError, json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the body is no OTLP trace export as {kind} ({str(error)[:200]})"
        ) from error
    return [_span(span) for span in spans], num_large


def _check_number(before: int, max_spans: int) -> None:
    if before >= max_spans:
        raise TooManySpans(f"the export has more than {max_spans} spans")


def _nested(message: memoryview, path: Sequence[int]) -> Iterator[memoryview]:
    """Yield the fields that lie in a protobuf message under a path of field numbers, unread."""
    if not path:
        yield message
        return
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(message, at)
                if tag >> 3 == path[0] and at + size <= len(message):
                    yield from _nested(message[at : at + size], path[1:])
                at += size
            case 5:
                at += 4
            case kind:
                raise ValueError(f"wire type {kind} at byte {at}")
    if at > len(message):
        raise ValueError(f"a field ends {at - len(message)} bytes after its message")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins there, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        number |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return number, at
    raise ValueError(f"a number does not end at byte {at}")


def write_response(num_rejected: int, reason: str, content_type: str) -> bytes:
    """The answer to an export request."""
    response = ExportTraceServiceResponse()
    if num_rejected:
        response.partial_success.rejected_spans = num_rejected
        response.partial_success.error_message = reason
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
    values = _attributes(span.attributes)
    error = None
    if span.status.code == Status.STATUS_CODE_ERROR:
        thrown = _exception(span)
        error = clip(span.status.message) or thrown.get("exception.message") or "it failed"
        values.setdefault(names.ERROR_TYPE, thrown.get("exception.type", "error"))
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() or None,
        name=clip(span.name),
        start_ns=span.start_time_unix_nano,
        end_ns=max(span.end_time_unix_nano, span.start_time_unix_nano),
        attributes=values,
        error=error,
    )


def _exception(span: OtlpSpan) -> dict[str, Any]:
    events = [event for event in span.events if event.name == "exception"]
    return _attributes(events[-1].attributes) if events else {}


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if not pair.key.startswith(OWN_PREFIX)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    match kind:
        case None:
            return ""
        case "string_value":
            return clip(value.string_value)
        case "bytes_value":
            return clip(value.bytes_value.hex())
        case "array_value":
            return tuple(_value(item) for item in value.array_value.values)
        case "kvlist_value":
            return {item.key: _value(item.value) for item in value.kvlist_value.values}
        case "double_value" if not math.isfinite(value.double_value):
            return str(value.double_value)  # JSON, as the store keeps it, has no such number
    return getattr(value, kind)


def clip(text: str) -> str:
    """The text, cut to MAX_CHARS with a word on how much more there was."""
    more = len(text) - MAX_CHARS
    return text if more <= 0 else f"{text[:MAX_CHARS]}... ({more} more characters)"


def _with_base64_ids(message: Any) -> Any:
    """OTLP's JSON writes ids in hex, where protobuf's writes bytes in base64."""
    if isinstance(message, list):
        return [_with_base64_ids(item) for item in message]
    if not isinstance(message, Mapping):
        return message
    return {
        key: base64.b64encode(bytes.fromhex(item)).decode()
        if key in ("traceId", "spanId", "parentSpanId") and isinstance(item, str)
        else _with_base64_ids(item)
        for key, item in message.items()
    }
