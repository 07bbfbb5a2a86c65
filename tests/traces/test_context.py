"""Tests of open spans, and of the trace contexts that come in and go out."""

import random
import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightning_jax.traces import attributes
from lightning_jax.traces.context import (
    OpenSpan,
    below,
    flush_process_tracer,
    parent_in,
    trace_headers,
)
from lightning_jax.traces.tree import call_order

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_an_ended_span_has_its_ids_and_no_attribute_that_is_none() -> None:
    before = time.time_ns()
    begun = OpenSpan("t" * 32, "p" * 16, sequence=3)
    ended = begun.end("chat policy", {"a": 1, "b": None, "c": ()}, "it broke")
    assert (ended.trace_id, ended.parent_span_id, ended.span_id) == (
        begun.trace_id, begun.parent_span_id, begun.span_id
    )  # fmt: skip
    assert (ended.name, ended.error, ended.sequence) == ("chat policy", "it broke", 3)
    assert ended.attributes == {"a": 1, "c": ()}
    assert before <= ended.start_ns <= ended.end_ns <= time.time_ns()


@pytest.mark.parametrize(
    ("message", "error"), [("it took too long", "it took too long"), ("", "x")]
)
def test_a_failed_span_says_why(message: str, error: str) -> None:
    failed = OpenSpan().fail("chat policy", {"a": 1}, "x", message)
    assert failed.error == error
    assert failed.attributes == {"a": 1, attributes.ERROR_TYPE: "x"}


def test_a_span_ends_at_its_start_if_the_clock_was_set_back() -> None:
    begun = OpenSpan(start_ns=time.time_ns() + 3_600 * 10**9)
    assert begun.end("chat", {}).end_ns == begun.start_ns


def test_a_child_is_below_its_span_and_has_its_place_in_the_order() -> None:
    call, later = OpenSpan(sequence=1), OpenSpan(sequence=2)
    choices = [call.child().end("choice", {attributes.CHOICE_INDEX: index}) for index in (1, 0)]
    assert {choice.parent_span_id for choice in choices} == {call.span_id}
    assert {choice.trace_id for choice in choices} == {call.trace_id}
    assert len({call.span_id, *(choice.span_id for choice in choices)}) == 3
    ordered = sorted([later.end("later", {}), *choices], key=call_order)
    assert [span.attributes.get(attributes.CHOICE_INDEX) for span in ordered] == [0, 1, None]


@pytest.mark.parametrize("header", ["", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_request_without_a_valid_traceparent_has_no_parent(header: str) -> None:
    assert parent_in({"traceparent": header}) is None is parent_in({})


def test_a_traceparent_is_the_parent() -> None:
    parent = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert parent_in({"traceparent": TRACEPARENT}) == parent


def test_spans_of_any_tracer_go_below_an_open_span() -> None:
    root, exporter, provider = OpenSpan(), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    assert trace_headers() == {}
    with below(root):
        assert trace_headers() == {"TRACEPARENT": f"00-{root.trace_id}-{root.span_id}-01"}
        provider.get_tracer("agent").start_span("theirs").end()
    assert trace_headers() == {}
    (theirs,) = exporter.get_finished_spans()
    assert theirs.parent is not None and theirs.context is not None
    assert trace.format_trace_id(theirs.context.trace_id) == root.trace_id
    assert trace.format_span_id(theirs.parent.span_id) == root.span_id


def test_ids_differ_though_an_agent_seeds_random() -> None:
    spans = []
    for _ in range(100):
        random.seed(0)
        spans.append(OpenSpan())
    assert len({span.trace_id for span in spans} | {span.span_id for span in spans}) == 200


def test_a_provider_that_holds_spans_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    flush_process_tracer()  # the API's own provider holds none
    timeouts: list[int] = []
    provider = TracerProvider()
    monkeypatch.setattr(provider, "force_flush", timeouts.append)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    flush_process_tracer(7)
    assert timeouts == [7]
