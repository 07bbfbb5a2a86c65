"""Spans that an agent's own instrumentation sends: OTLP over HTTP, as protobuf or JSON.

Agents are not trusted to tell what the policy sampled, so attributes with the reserved prefix are
removed from their spans.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from lightning_jax.errors import InvalidValue
from lightning_jax.traces import attributes
from lightning_jax.types import Span

RESERVED_PREFIX = "lightning."
MAX_CHARS = 32_768  # for one attribute; a tool may print megabytes
MAX_NOTE_CHARS = 64  # for the note at the end of a cut text
MAX_KEY_CHARS = 256
MAX_ATTRIBUTES = 1_024  # for a span; SDKs keep 128 by default
MAX_SPAN_CHARS = 2**20  # for a span's keys and values together; a number counts as 8
MAX_SPANS = 2_048  # in one request; SDKs send 512
MAX_SPAN_BYTES = 2**22  # for one span as protobuf, since parsing holds the interpreter lock
MAX_TAGS = 2**21  # bytes in one protobuf message that may begin an entry; 30 ms of parsing at most
_URL_SAFE = str.maketrans("-_", "+/")  # base64 comes with either alphabet
PROTOBUF, JSON = "application/x-protobuf", "application/json"


@dataclass(frozen=True)
class Export:
    """Spans from one request, within the limits above."""

    spans: tuple[Span, ...]
    sizes: tuple[int, ...]  # bytes of each span in the store
    num_excess: int = 0  # spans not read because they are too many or too large
    num_dropped_attributes: int = 0  # total for all spans; each span holds its own number


def read_request(body: bytes | Mapping[str, Any]) -> Export:
    """Return the spans of an export request, which is protobuf or a JSON object.

    Raise InvalidValue if the body is not such a request.
    """
    kind = PROTOBUF if isinstance(body, bytes) else JSON
    sent: list[OtlpSpan] = []
    num_spans = 0
    try:
        if isinstance(body, bytes):
            # Parse one span at a time, because the C parser does not release the interpreter lock.
            for resource in filter(None, _split(body).first):
                for scope in filter(None, _split(resource).second):
                    raw_spans = _split(scope).second
                    num_spans += len(raw_spans)
                    fitting = (raw for raw in raw_spans if len(raw) <= MAX_SPAN_BYTES)
                    sent += map(OtlpSpan.FromString, islice(fitting, MAX_SPANS - len(sent)))
        else:
            request = ExportTraceServiceRequest()
            json_format.ParseDict(_as_protobuf_json(body), request, ignore_unknown_fields=True)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    num_spans += len(scope.spans)
                    sent += scope.spans[: MAX_SPANS - len(sent)]
    except (DecodeError, json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise InvalidValue(
            f"the body is not a valid OTLP trace export in {kind} ({str(error)[:200]})",
            reason="malformed",
        ) from error
    spans = tuple(map(_span, sent))
    return Export(
        spans=spans,
        sizes=tuple(map(stored_size, spans)),
        num_excess=num_spans - len(spans),
        num_dropped_attributes=sum(
            span.attributes.get(attributes.DROPPED_ATTRIBUTES, 0) for span in spans
        ),
    )


def stored_size(span: Span) -> int:
    """Return the approximate number of bytes that a span takes in the store."""
    attributes = json.dumps(dict(span.attributes), separators=(",", ":"), ensure_ascii=False)
    return len(attributes.encode()) + len(span.name.encode()) + len((span.error or "").encode())


def _make_envelope() -> type[Any]:
    """Return a class of messages whose fields 1 and 2 are repeated and stay unparsed."""
    field = descriptor_pb2.FieldDescriptorProto
    fields = [
        field(name=name, number=number, type=field.TYPE_BYTES, label=field.LABEL_REPEATED)
        for number, name in enumerate(("first", "second"), start=1)
    ]
    message = descriptor_pb2.DescriptorProto(name="Envelope", field=fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(descriptor_pb2.FileDescriptorProto(name="envelope.proto", message_type=[message]))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Envelope"))


_Envelope = _make_envelope()
_TAGS = (b"\x0a", b"\x8a", b"\x12", b"\x92")  # first bytes of an entry, in short and long form


def _split(message: bytes) -> Any:
    """Return a request (1: resource_spans), a resource (2: scope_spans) or a scope (2: spans).

    Refuse millions of entries before they are parsed. The count of tags is never too low.
    """
    if sum(map(message.count, _TAGS)) > MAX_TAGS:
        raise ValueError(f"more than {MAX_TAGS} entries in one message")
    return _Envelope.FromString(message)


def write_response(
    refused: Mapping[str, int], num_dropped_attributes: int, content_type: str
) -> bytes:
    """Return the response to an export request.

    It gives the number of refused spans by reason, and the number of dropped attributes of the
    others.
    """
    response = ExportTraceServiceResponse()
    reasons = [f"{number} spans: {reason}" for reason, number in refused.items()]
    if num_dropped_attributes:
        reasons.append(
            f"{num_dropped_attributes} attributes dropped because they were too long or too many"
        )
    if reasons:
        response.partial_success.rejected_spans = sum(refused.values())
        response.partial_success.error_message = "; ".join(reasons)
    if content_type == JSON:
        return json_format.MessageToJson(response, indent=None).encode()
    return response.SerializeToString()


def _span(span: OtlpSpan) -> Span:
    if len(span.trace_id) != 16 or len(span.span_id) != 8:
        raise InvalidValue(
            f"span {span.name!r} has a trace id of {len(span.trace_id)} bytes and a span id of "
            f"{len(span.span_id)}; expected 16 and 8",
            reason="wrong_length",
            key="trace_id",
        )
    if max(span.start_time_unix_nano, span.end_time_unix_nano) >= 2**63:
        raise InvalidValue.out_of_range(
            "end_time_unix_nano",
            f"span {span.name!r} ends after the year 2262; expected nanoseconds",
        )
    reader = _Reader()
    values = reader.attributes(span.attributes)
    error = None
    if span.status.code == Status.STATUS_CODE_ERROR:
        events = [event for event in span.events if event.name == "exception"]
        thrown = _Reader().attributes(events[-1].attributes) if events else {}
        error = clip(span.status.message) or str(thrown.get("exception.message", ""))
        values.setdefault(attributes.ERROR_TYPE, str(thrown.get("exception.type", "error")))
    if reader.num_dropped:
        values[attributes.DROPPED_ATTRIBUTES] = reader.num_dropped
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


class _TooLong(Exception):
    """Attributes of a span with more text than MAX_SPAN_CHARS."""


class _Reader:
    """Reader of one span's attributes that drops those that are too long or too many."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._num_chars = 0

    def attributes(self, pairs: Sequence[KeyValue]) -> dict[str, Any]:
        """Return the attributes without those that have our own prefix."""
        values: dict[str, Any] = {}
        for index, pair in enumerate(pairs):
            if len(values) == MAX_ATTRIBUTES:
                self.num_dropped += len(pairs) - index
                break
            if pair.key.startswith(RESERVED_PREFIX):
                continue
            num_chars = self._num_chars
            try:
                if len(pair.key) > MAX_KEY_CHARS:
                    raise _TooLong
                self._take(len(pair.key))
                values[pair.key] = self._value(pair.value)
            except _TooLong:
                self.num_dropped += 1
                self._num_chars = num_chars
        return values

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
                # The store keeps JSON, which has no such number.
                return self._text(str(value.double_value))
        self._take(8)
        return getattr(value, kind)

    def _text(self, text: str) -> str:
        self._take(8 + len(text))
        return text

    def _take(self, num_chars: int) -> None:
        self._num_chars += num_chars
        if self._num_chars > MAX_SPAN_CHARS:
            raise _TooLong


def clip(text: str) -> str:
    """Return the text, cut to MAX_CHARS with a note of how much more there was.

    A text that was cut before stays as it is.
    """
    more = len(text) - MAX_CHARS
    return text if more <= MAX_NOTE_CHARS else f"{text[:MAX_CHARS]}... ({more} more characters)"


def _as_protobuf_json(message: Any) -> Any:
    """Return OTLP's JSON as protobuf's: ids in base64 instead of hex, and no text longer than the
    record keeps. Protobuf's parser holds the interpreter for a third of a second over 10 MB.
    """
    match message:
        case str():
            return clip(message)
        case list():
            return [_as_protobuf_json(item) for item in message]
        case {"bytesValue": str(text)} if len(text) > MAX_CHARS:
            return {"stringValue": clip(base64.b64decode(text.translate(_URL_SAFE) + "==").hex())}
        case dict():
            return {
                clip(key): base64.b64encode(bytes.fromhex(item)).decode()
                if key in ("traceId", "spanId", "parentSpanId") and isinstance(item, str)
                else _as_protobuf_json(item)
                for key, item in message.items()
            }
    return message
