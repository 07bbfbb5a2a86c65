"""What OpenTelemetry's own SDK and others send is read, and cannot pass for what was sampled."""

import json
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from lightning_jax.tracing import attributes as names
from lightning_jax.tracing.otlp import JSON, MAX_CHARS, PROTOBUF, read_request, write_response

TRACE, SPAN = bytes(range(16)), bytes(range(8))


def _request(**fields: Any) -> bytes:
    request = ExportTraceServiceRequest()
    span = OtlpSpan(
        trace_id=TRACE, span_id=SPAN, name="tool", start_time_unix_nano=5, end_time_unix_nano=9
    )
    attributes = fields.pop("attributes", {})
    for key, value in attributes.items():
        span.attributes.append(KeyValue(key=key, value=value))
    for name, value in fields.items():
        setattr(span, name, value)
    request.resource_spans.add().scope_spans.add().spans.append(span)
    return request.SerializeToString()


def test_a_protobuf_span_is_read() -> None:
    nested = AnyValue()
    nested.array_value.values.extend([AnyValue(int_value=1), AnyValue(double_value=0.5)])
    table = AnyValue()
    table.kvlist_value.values.append(KeyValue(key="a", value=AnyValue(bool_value=True)))
    body = _request(
        parent_span_id=bytes(8)[:7] + b"\1",
        attributes={
            "gen_ai.operation.name": AnyValue(string_value="execute_tool"),
            "numbers": nested,
            "table": table,
            "raw": AnyValue(bytes_value=b"\xff"),
            "long": AnyValue(string_value="x" * (MAX_CHARS + 7)),
            "none": AnyValue(),
            "odd": AnyValue(double_value=float("nan")),
            names.RESPONSE_TOKEN_IDS: nested,
        },
    )
    (span,) = read_request(body, PROTOBUF)
    assert (span.trace_id, span.span_id) == (TRACE.hex(), SPAN.hex())
    assert span.parent_span_id == "0" * 15 + "1"
    assert (span.start_ns, span.end_ns, span.error) == (5, 9, None)
    assert span.attributes["numbers"] == (1, 0.5) and span.attributes["table"] == {"a": True}
    assert span.attributes["raw"] == "ff" and span.attributes["none"] == ""
    assert span.attributes["long"] == "x" * MAX_CHARS + "... (7 more characters)"
    assert span.attributes["odd"] == "nan"  # the store's JSON has no such number
    assert names.RESPONSE_TOKEN_IDS not in span.attributes  # only the gateway says what was sampled


def test_an_error_says_what_was_raised() -> None:
    request = ExportTraceServiceRequest.FromString(_request())
    span = request.resource_spans[0].scope_spans[0].spans[0]
    span.status.code = Status.STATUS_CODE_ERROR
    event = span.events.add(name="exception")
    for key, value in (("exception.type", "TimeoutError"), ("exception.message", "30 s")):
        event.attributes.append(KeyValue(key=key, value=AnyValue(string_value=value)))
    (read,) = read_request(request.SerializeToString(), PROTOBUF)
    assert (read.error, read.attributes[names.ERROR_TYPE]) == ("30 s", "TimeoutError")
    span.status.message = "too slow"
    (read,) = read_request(request.SerializeToString(), PROTOBUF)
    assert read.error == "too slow"


def test_json_has_ids_in_hex() -> None:
    span = {
        "traceId": TRACE.hex(),
        "spanId": SPAN.hex(),
        "name": "t",
        "startTimeUnixNano": "1700000000000000000",
        "endTimeUnixNano": "1700000000000000001",
        "attributes": [{"key": "n", "value": {"intValue": "3"}}],
        "fieldOfTomorrow": 1,
    }
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    (read,) = read_request(json.dumps(body).encode(), JSON)
    assert (read.trace_id, read.span_id) == (TRACE.hex(), SPAN.hex())
    assert read.parent_span_id is None and read.attributes == {"n": 3}
    assert read.start_ns == 1_700_000_000_000_000_000


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"\xff\xff", PROTOBUF),
        (b"{", JSON),
        (b"[1]", JSON),
        (b'{"resourceSpans": 3}', JSON),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}', JSON),
        (_request(trace_id=b"short"), PROTOBUF),
    ],
)
def test_what_is_no_export_is_refused(body: bytes, kind: str) -> None:
    with pytest.raises(ValueError, match=r"no OTLP trace export|expected 16 and 8"):
        read_request(body, kind)


def test_the_answer_tells_what_was_rejected() -> None:
    answer = ExportTraceServiceResponse.FromString(write_response(2, "why", PROTOBUF))
    assert answer.partial_success.rejected_spans == 2
    assert answer.partial_success.error_message == "why"
    assert write_response(0, "", PROTOBUF) == b""
    assert json.loads(write_response(2, "why", JSON))["partialSuccess"]["errorMessage"] == "why"
