"""Tests that spans reach the store as soon as they end, whatever the process does with
OpenTelemetry.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode

from lightning_jax.errors import InvalidValue
from lightning_jax.traces import attributes
from lightning_jax.traces._sqlite import StoreError
from lightning_jax.traces.store import Store
from lightning_jax.traces.tracer import (
    JsonFloats,
    Root,
    below_root,
    child_context,
    context_of,
    end_with_error,
    make_tracer,
    trace_headers,
)
from lightning_jax.traces.tree import call_order

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def store(tmp_path: Path):
    store = Store(tmp_path / "store.sqlite")
    yield store
    store.close()


def test_an_ended_span_is_in_the_store_with_its_ids(store: Store) -> None:
    tracer = make_tracer(store)
    span = tracer.start_span(
        "chat policy",
        attributes={attributes.ROLLOUT_ID: "r1", attributes.PROMPT_TOKEN_IDS: (5, 6)},
        start_time=100,
    )
    assert store.spans("r1") == []
    span.set_attribute(attributes.BEHAVIOR_LOGPROBS, (-0.25, -1.0))
    span.end(end_time=250)
    (record,) = store.spans("r1")
    assert (record.name, record.start_ns, record.end_ns) == ("chat policy", 100, 250)
    assert record.attributes == {
        attributes.ROLLOUT_ID: "r1",
        attributes.PROMPT_TOKEN_IDS: (5, 6),
        attributes.BEHAVIOR_LOGPROBS: (-0.25, -1.0),
    }
    assert record.parent_span_id is None and record.error is None
    assert record.span_id == trace.format_span_id(span.get_span_context().span_id)


@pytest.mark.parametrize("numbers", [(), (3, 1, 2), (-0.5, 0.0), (True, False)])
def test_numbers_of_tokens_reach_the_store_as_they_are(store: Store, numbers: Any) -> None:
    span = make_tracer(store).start_span("call", attributes={"given": JsonFloats(numbers)})
    span.set_attributes({"later": JsonFloats(numbers), "text": "3 numbers"})
    span.end()
    (found,) = store.spans(None)
    assert found.attributes == {"given": numbers, "later": numbers, "text": "3 numbers"}
    assert all(type(a) is type(b) for a, b in zip(found.attributes["given"], numbers, strict=True))


def test_a_failed_span_says_why(store: Store) -> None:
    span = make_tracer(store).start_span("chat policy")
    end_with_error(span, "call_timeout", "it took too long")
    (record,) = store.spans(None)
    assert record.error == "it took too long"
    assert record.attributes[attributes.ERROR_TYPE] == "call_timeout"


def test_the_agents_trace_is_the_parent(store: Store) -> None:
    tracer = make_tracer(store)
    span = tracer.start_span("chat", context=context_of({"traceparent": TRACEPARENT})[0])
    tracer.start_span("choice", context=child_context(span)).end()
    span.end()
    call, child = sorted(store.spans(None), key=lambda record: record.name)
    assert call.trace_id == child.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert call.parent_span_id == "b7ad6b7169203331" and child.parent_span_id == call.span_id


@pytest.mark.parametrize("header", ["", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_request_without_a_valid_traceparent_names_no_trace(store: Store, header: str) -> None:
    context, trace_id = context_of({"traceparent": header})
    assert trace_id is None
    tracer = make_tracer(store)
    for _ in range(2):
        tracer.start_span("chat", context=context).end()
    one, two = store.spans(None)
    assert one.trace_id != two.trace_id and one.parent_span_id is two.parent_span_id is None
    assert context_of({"traceparent": TRACEPARENT})[1] == "0af7651916cd43dd8448eb211c80319c"


def test_a_root_is_where_its_traceparent_says() -> None:
    root = Root(sequence=3)
    record = root.span("r1", 5, 9, {"a": 1}, "it broke")
    assert trace_headers() == {}
    with below_root(root):
        assert trace_headers() == {"TRACEPARENT": f"00-{root.trace_id}-{root.span_id}-01"}
    assert trace_headers() == {}
    assert (record.trace_id, record.span_id) == (root.trace_id, root.span_id)
    assert record.parent_span_id is None and record.error == "it broke" and record.sequence == 3
    assert record.attributes == {
        "a": 1, attributes.ROLLOUT_ID: "r1", attributes.OPERATION_NAME: "invoke_agent"
    }  # fmt: skip


def test_ids_of_roots_are_random() -> None:
    roots = [Root() for _ in range(100)]
    assert len({root.trace_id for root in roots} | {root.span_id for root in roots}) == 200


def test_spans_are_ordered_by_their_beginning_though_the_clock_is_set_back(store: Store) -> None:
    tracer = make_tracer(store)
    hour = 3_600 * 10**9
    first = tracer.start_span("first", start_time=2 * hour)
    second = tracer.start_span("second", start_time=hour)  # the clock was set back
    second.end(end_time=hour + 1)
    first.end(end_time=hour + 2)
    assert [span.name for span in store.spans(None)] == ["first", "second"]
    assert [span.name for span in sorted(store.spans(None), key=call_order)] == ["first", "second"]
    assert all(span.end_ns >= span.start_ns for span in store.spans(None))


def test_choices_have_the_place_of_their_call(store: Store) -> None:
    tracer = make_tracer(store)
    call = tracer.start_span("call")
    tracer.start_span("later call").end()
    for index in (1, 0):
        values = {attributes.CHOICE_INDEX: index}
        tracer.start_span("choice", context=child_context(call), attributes=values).end()
    call.end()
    ordered = sorted(store.spans(None), key=call_order)
    assert [span.name for span in ordered[-1:]] == ["later call"]
    assert [s.attributes[attributes.CHOICE_INDEX] for s in ordered if s.name == "choice"] == [0, 1]
    assert not any(attributes.SEQUENCE in span.attributes for span in ordered)


def test_ids_differ_though_an_agent_seeds_random(store: Store) -> None:
    tracer = make_tracer(store)
    for _ in range(3):
        random.seed(0)
        tracer.start_span("chat").end()
    assert len(store.spans(None)) == 3


def test_process_opentelemetry_is_unchanged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "2")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "1")
    provider_before = trace.get_tracer_provider()
    tracer = make_tracer(store)
    assert trace.get_tracer_provider() is provider_before
    assert not isinstance(provider_before, TracerProvider)
    tracer.start_span("chat", attributes={"a": "long text", "b": tuple(range(500))}).end()
    (record,) = store.spans(None)
    assert record.attributes == {"a": "long text", "b": tuple(range(500))}
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(InvalidValue) as caught:
        make_tracer(store)
    assert (caught.value.key, caught.value.reason) == ("OTEL_SDK_DISABLED", "conflict")


def test_a_span_that_cannot_be_written_is_not_lost_in_silence(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.sqlite")
    span = make_tracer(store).start_span("chat")
    span.set_status(StatusCode.OK)
    store.close()
    with pytest.raises(StoreError):
        span.end()
