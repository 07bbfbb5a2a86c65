"""Tests that spans from OpenTelemetry's SDK and others are read but cannot pass for samples."""

import json
import re
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from lightning_jax.errors import InvalidValue
from lightning_jax.traces import attributes, otlp
from lightning_jax.traces.otlp import (
    JSON,
    MAX_ATTRIBUTES,
    MAX_CHARS,
    MAX_KEY_CHARS,
    MAX_SPAN_CHARS,
    MAX_SPANS,
    PROTOBUF,
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
            "long": AnyValue(string_value="x" * (MAX_CHARS + 70)),
            "none": AnyValue(),
            "odd": AnyValue(double_value=float("nan")),
            attributes.RESPONSE_TOKEN_IDS: nested,
        },
    )
    (span,) = read_request(body).spans
    assert (span.trace_id, span.span_id) == (TRACE.hex(), SPAN.hex())
    assert span.parent_span_id == "0" * 15 + "1"
    assert (span.start_ns, span.end_ns, span.error) == (5, 9, None)
    assert span.attributes["numbers"] == (1, 0.5) and span.attributes["table"] == {"a": True}
    assert span.attributes["raw"] == "ff" and span.attributes["none"] == ""
    assert span.attributes["long"] == "x" * MAX_CHARS + "... (70 more characters)"
    assert span.attributes["odd"] == "nan"  # the store's JSON has no such number
    assert (
        attributes.RESPONSE_TOKEN_IDS not in span.attributes
    )  # only the gateway may record samples


def test_an_error_says_what_was_raised() -> None:
    request = ExportTraceServiceRequest.FromString(_request())
    span = request.resource_spans[0].scope_spans[0].spans[0]
    span.status.code = Status.STATUS_CODE_ERROR
    event = span.events.add(name="exception")
    for key, value in (("exception.type", "TimeoutError"), ("exception.message", "30 s")):
        event.attributes.append(KeyValue(key=key, value=AnyValue(string_value=value)))
    (read,) = read_request(request.SerializeToString()).spans
    assert (read.error, read.attributes[attributes.ERROR_TYPE]) == ("30 s", "TimeoutError")
    span.status.message = "too slow"
    (read,) = read_request(request.SerializeToString()).spans
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
    (read,) = read_request(body).spans
    assert (read.trace_id, read.span_id) == (TRACE.hex(), SPAN.hex())
    assert read.parent_span_id is None and read.attributes == {"n": 3}
    assert read.start_ns == 1_700_000_000_000_000_000


def test_long_values_read_alike_in_both_encodings() -> None:
    long = 3 * MAX_CHARS + 1
    sent = _request(
        name="x" * long,
        attributes={
            "text": AnyValue(string_value="x" * long),
            "bytes": AnyValue(bytes_value=bytes(range(256)) * (long // 256)),
            "k" * long: AnyValue(bool_value=True),
        },
    )
    message = json_format.MessageToDict(ExportTraceServiceRequest.FromString(sent))
    (span,) = message["resourceSpans"][0]["scopeSpans"][0]["spans"]
    span |= {"traceId": TRACE.hex(), "spanId": SPAN.hex(), "parentSpanId": ""}
    assert read_request(message) == read_request(sent)
    assert read_request(sent).num_dropped_attributes == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\xff\xff", "malformed"),
        (b"\x0a\x05", "malformed"),  # a field that ends after the body
        (b"\x0a" + b"\xff" * 12, "malformed"),  # a length that does not end
        (b"\x0b", "malformed"),  # a group
        (b"\x0a\x00" * (otlp.MAX_TAGS + 1), "malformed"),  # millions of resources
        (b"\x92\x00\x00" * (otlp.MAX_TAGS + 1), "malformed"),  # and of scopes, in long form
        ({"resourceSpans": 3}, "malformed"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}, "malformed"),
        (_request(trace_id=b"short"), "wrong_length"),
        (_request(start_time_unix_nano=2**63), "out_of_range"),
    ],
)
def test_what_is_no_export_is_refused(body: bytes | dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_request(body)
    assert caught.value.reason == reason


def test_spans_are_found_as_the_library_finds_them() -> None:
    request = ExportTraceServiceRequest.FromString(_request())
    request.resource_spans[0].resource.attributes.add(key="x")
    request.resource_spans.add(schema_url="u").scope_spans.add().scope.name = "no spans"
    request.resource_spans.add().scope_spans.add().spans.add(
        trace_id=TRACE, span_id=SPAN, name="second", flags=7
    )
    export = read_request(request.SerializeToString())
    assert [span.name for span in export.spans][1:] == ["second"]
    assert (len(export.spans), export.num_excess) == (2, 0)


def test_span_too_large_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MAX_SPAN_BYTES", 1000)
    large = _request(attributes={"x": AnyValue(string_value="x" * 2000)})
    export = read_request(_request() + large)
    assert (len(export.spans), export.num_excess) == (1, 1)


def test_the_answer_tells_what_was_rejected() -> None:
    response = write_response({"why": 2, "wherefore": 1}, 0, PROTOBUF)
    answer = ExportTraceServiceResponse.FromString(response)
    assert answer.partial_success.rejected_spans == 3
    message = answer.partial_success.error_message
    assert re.findall(r"\d|why|wherefore", message) == ["2", "why", "1", "wherefore"]
    assert write_response({}, 0, PROTOBUF) == b""
    partial = json.loads(write_response({}, 5, JSON))["partialSuccess"]
    assert "rejectedSpans" not in partial and "5" in partial["errorMessage"]


def _list(*values: AnyValue) -> AnyValue:
    made = AnyValue()
    made.array_value.values.extend(values)
    return made


def test_attributes_are_dropped_above_the_limits_and_counted() -> None:
    numbers = _list(*[AnyValue(int_value=1)] * (MAX_SPAN_CHARS // 8 + 1))
    table = AnyValue()
    table.kvlist_value.values.append(
        KeyValue(key="k" * MAX_SPAN_CHARS, value=AnyValue(bool_value=True))
    )
    sent = {
        "k" * (MAX_KEY_CHARS + 1): AnyValue(int_value=1),
        "numbers": numbers,
        "table": table,
        "kept": AnyValue(string_value="x" * MAX_CHARS),
        "k" * MAX_KEY_CHARS: AnyValue(int_value=2),
        "lightning.reward": AnyValue(int_value=1),
    }
    export = read_request(_request(attributes=sent))
    (span,) = export.spans
    assert set(span.attributes) == {"kept", "k" * MAX_KEY_CHARS, attributes.DROPPED_ATTRIBUTES}
    assert span.attributes[attributes.DROPPED_ATTRIBUTES] == export.num_dropped_attributes == 3
    assert 0 < export.sizes[0] - MAX_CHARS < 1_000
    many = {f"a{n}": AnyValue(int_value=n) for n in range(MAX_ATTRIBUTES + 2)}
    export = read_request(_request(attributes=many))
    assert len(export.spans[0].attributes) == MAX_ATTRIBUTES + 1
    assert export.num_dropped_attributes == 2


def test_total_text_of_a_span_is_limited() -> None:
    texts = {f"t{n}": AnyValue(string_value="x" * MAX_CHARS) for n in range(40)}
    export = read_request(_request(attributes=texts))
    assert export.num_dropped_attributes == 40 - MAX_SPAN_CHARS // MAX_CHARS + 1
    assert export.sizes[0] < 1.1 * MAX_SPAN_CHARS


def test_a_request_has_a_limit_of_spans() -> None:
    request = ExportTraceServiceRequest()
    for num_spans in (MAX_SPANS - 1, 3, 2):
        spans = request.resource_spans.add().scope_spans.add().spans
        for n in range(num_spans):
            spans.add(trace_id=TRACE, span_id=n.to_bytes(8, "big"))
    export = read_request(request.SerializeToString())
    assert (len(export.spans), export.num_excess) == (MAX_SPANS, 4)


@pytest.mark.parametrize("key", ["exception.type", "exception.message"])
def test_an_error_is_a_text_whatever_was_sent(key: str) -> None:
    request = ExportTraceServiceRequest.FromString(_request())
    span = request.resource_spans[0].scope_spans[0].spans[0]
    span.status.code = Status.STATUS_CODE_ERROR
    event = span.events.add(name="exception")
    event.attributes.append(KeyValue(key=key, value=_list(AnyValue(int_value=3))))
    (read,) = read_request(request.SerializeToString()).spans
    assert isinstance(read.error, str) and isinstance(read.attributes[attributes.ERROR_TYPE], str)
