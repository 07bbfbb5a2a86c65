"""Tests that Forest takes O(n log n) steps and gives the results of the quadratic algorithm."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_jax.traces import attributes
from lightning_jax.traces.tree import Agents, ancestors, attach_loose_calls, causes
from lightning_jax.types import Span

CALL = {
    attributes.OPERATION_NAME: "chat",
    attributes.POLICY: "policy",
    attributes.RESPONSE_TOKEN_IDS: (1,),
}
KINDS: list[dict[str, Any]] = [
    {},
    {attributes.AGENT_NAME: "a"},
    {attributes.OPERATION_NAME: "execute_tool"},
    CALL,
    CALL | {attributes.ROLLOUT_ID: "r"},
]


def old_causes(spans: list[Span]) -> list[tuple[Span, Span | None]]:
    by_id = {span.span_id: span for span in spans}
    calls = sorted((s for s in spans if attributes.RESPONSE_TOKEN_IDS in s.attributes), key=_end)
    paths = [{above.span_id for above in ancestors(call, by_id)} for call in calls]

    def cause(tool: Span) -> Span | None:
        ended = [pair for pair in zip(calls, paths, strict=True) if pair[0].end_ns <= tool.start_ns]
        for above in list(ancestors(tool, by_id))[1:]:
            inside = [call for call, path in ended if above.span_id in path]
            if inside:
                return inside[-1]
        return ended[-1][0] if ended else None

    return [
        (s, cause(s))
        for s in spans
        if s.attributes.get(attributes.OPERATION_NAME) == "execute_tool"
    ]


def _end(span: Span) -> int:
    return span.end_ns


def old_parents(spans: list[Span]) -> list[str | None]:
    roots = {span.span_id for span in spans if span.parent_span_id is None}
    theirs = [span for span in spans if attributes.ROLLOUT_ID not in span.attributes]

    def parent(call: Span) -> str | None:
        around = [s for s in theirs if s.start_ns <= call.start_ns and call.end_ns <= s.end_ns]
        above = max(around, key=lambda span: (span.start_ns, -span.end_ns), default=None)
        is_below_root = (call.parent_span_id or "") in {*roots, ""}
        is_loose = attributes.POLICY in call.attributes and is_below_root
        return above.span_id if above and is_loose else call.parent_span_id

    return [parent(span) for span in spans]


def old_agent(span: Span, by_id: dict[str, Span]) -> str:
    found = (span.attributes.get(attributes.AGENT_NAME) for span in ancestors(span, by_id))
    return str(next((name for name in found if name), ""))


@st.composite
def trees(draw: st.DrawFn) -> list[Span]:
    """Draw spans whose times often coincide, with any parents, including cycles."""
    size = draw(st.integers(0, 12))
    spans = []
    for index in range(size):
        parent = draw(st.sampled_from([None, "nowhere", *map(str, range(size))]))
        start = draw(st.integers(0, 8))
        kind = draw(st.sampled_from(KINDS))
        end = start + draw(st.integers(0, 5))
        spans.append(Span("t", str(index), parent, "s", start, end, kind))
    return spans


@settings(deadline=None, max_examples=1000)
@given(spans=trees())
def test_every_tree_reads_as_before(spans: list[Span]) -> None:
    assert causes(spans) == old_causes(spans)
    assert [span.parent_span_id for span in attach_loose_calls(spans)] == old_parents(spans)
    by_id = {span.span_id: span for span in spans}
    agents = Agents(by_id)
    assert [agents.of(span) for span in spans] == [old_agent(span, by_id) for span in spans]


def _chain(size: int) -> list[Span]:
    """Return spans below each other, every third a tool and every third a call."""
    return [
        Span("t", str(i), str(i - 1) if i else None, "s", i, 2 * size - i, KINDS[2:][i % 3])
        for i in range(size)
    ]


def _side_by_side(size: int) -> list[Span]:
    """Return calls below a root next to spans that overlap in time."""
    theirs = [Span("t", f"s{i}", "root", "s", i, size + i, {}) for i in range(size)]
    calls = [Span("t", f"c{i}", "root", "s", size, size + i, KINDS[-1]) for i in range(size)]
    return [Span("t", "root", None, "s", 0, 3 * size, KINDS[1]), *theirs, *calls]


@pytest.mark.parametrize("shape", [_chain, _side_by_side])
def test_cpu_time_grows_with_the_number_of_spans(shape: Callable[[int], list[Span]]) -> None:
    """Eight times the spans take about eight times as long; the quadratic algorithm took 64."""

    def cost(size: int) -> float:
        spans, times = shape(size), []
        for _ in range(3):
            began = time.thread_time()
            read = attach_loose_calls(spans)
            causes(read)
            agents = Agents({span.span_id: span for span in read})
            for span in read:
                agents.of(span)
            times.append(time.thread_time() - began)
        return min(times)

    small, large = cost(250), cost(2000)
    assert large < 24 * small
