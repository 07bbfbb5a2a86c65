"""Spans that an agent's own instrumentation sends: OTLP over HTTP, as protobuf or JSON.

What comes from an agent is not trusted to say what the policy sampled: attributes under our own
prefix are taken out of it.
"""

import base64
import json
import math
from collections.abc import Iterable, Mapping
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
PROTOBUF, JSON = "application/x-protobuf", "application/json"


def read_request(body: bytes, content_type: str) -> list[Span]:
    """The spans of an export request. Raises ValueError for a body that is none."""
    try:
        if content_type == JSON:
            request = ExportTraceServiceRequest()
            fields = _with_base64_ids(json.loads(body))
            json_format.ParseDict(fields, request, ignore_unknown_fields=True)
        else:
            request = ExportTraceServiceRequest.FromString(body)
    except (DecodeError, json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the body is no OTLP trace export as {content_type} ({str(error)[:200]})"
        ) from error
    return [
        _span(span)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


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
