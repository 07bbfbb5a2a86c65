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
from lightning_jax.tracing.otlp import (
    JSON,
    MAX_CHARS,
    PROTOBUF,
    TooManySpans,
    read_request,
    write_response,
)

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
    (span,), _ = read_request(body)
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
    (read,), _ = read_request(request.SerializeToString())
    assert (read.error, read.attributes[names.ERROR_TYPE]) == ("30 s", "TimeoutError")
    span.status.message = "too slow"
    (read,), _ = read_request(request.SerializeToString())
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
    (read,), _ = read_request(body)
    assert (read.trace_id, read.span_id) == (TRACE.hex(), SPAN.hex())
    assert read.parent_span_id is None and read.attributes == {"n": 3}
    assert read.start_ns == 1_700_000_000_000_000_000


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xff",
        b"\x0a\x05",  # a field that ends after the body
        b"\x0a" + b"\xff" * 12,  # a length without an end
        b"\x0b",  # a group
        {"resourceSpans": 3},
        {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]},
        _request(trace_id=b"short"),
    ],
)
def test_what_is_no_export_is_refused(body: bytes | dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no OTLP trace export|expected 16 and 8"):
        read_request(body)


def test_spans_are_found_as_the_library_finds_them() -> None:
    request = ExportTraceServiceRequest.FromString(_request())
    request.resource_spans[0].resource.attributes.add(key="x")
    request.resource_spans.add(schema_url="u").scope_spans.add().scope.name = "no spans"
    request.resource_spans.add().scope_spans.add().spans.add(
        trace_id=TRACE, span_id=SPAN, name="second", flags=7
    )
    spans, num_large = read_request(request.SerializeToString())
    assert ([span.name for span in spans][1:], len(spans), num_large) == (["second"], 2, 0)


def test_more_spans_than_allowed_are_refused() -> None:
    with pytest.raises(TooManySpans):
        read_request(_request() * 3, max_spans=2)
    assert len(read_request(_request() * 2, max_spans=2)[0]) == 2
    one = {"traceId": TRACE.hex(), "spanId": SPAN.hex()}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [one] * 3}]}]}
    with pytest.raises(TooManySpans):
        read_request(body, max_spans=2)
    assert len(read_request(body, max_spans=3)[0]) == 3


def test_a_span_too_large_is_left_out_and_counted() -> None:
    large = _request(attributes={"x": AnyValue(string_value="x" * 2000)})
    spans, num_large = read_request(_request() + large, max_span_bytes=1000)
    assert (len(spans), num_large) == (1, 1)


def test_the_answer_tells_what_was_rejected() -> None:
    answer = ExportTraceServiceResponse.FromString(write_response(2, "why", PROTOBUF))
    assert answer.partial_success.rejected_spans == 2
    assert answer.partial_success.error_message == "why"
    assert write_response(0, "", PROTOBUF) == b""
    assert json.loads(write_response(2, "why", JSON))["partialSuccess"]["errorMessage"] == "why"
