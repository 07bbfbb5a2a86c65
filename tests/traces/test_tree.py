"""Tests that agents and tools are found in the tree of a rollout's spans."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_jax.traces import attributes
from lightning_jax.traces.tree import (
    MAX_DEPTH,
    Agents,
    ancestors,
    attach_loose_calls,
    causes,
    in_tree_order,
    is_tool,
    tool_output,
)
from lightning_jax.types import Span

CALL = {
    attributes.OPERATION_NAME: "chat",
    attributes.POLICY: "policy",
    attributes.RESPONSE_TOKEN_IDS: (1,),
}
TOOL = {attributes.OPERATION_NAME: "execute_tool"}


def _span(name: str, parent: str | None, times: tuple[int, int], **attributes: Any) -> Span:
    return Span("t", name, parent, name, *times, attributes)


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.agent.name": "writer"},
        {"agent.name": "writer"},
        {"graph.node.id": "writer"},
        {"lightning.agent": "writer", "gen_ai.agent.name": "other"},
    ],
)
def test_the_nearest_span_that_names_an_agent_names_it(attributes: dict[str, str]) -> None:
    spans = [
        _span("root", None, (0, 9), **{"gen_ai.agent.name": "team"}),
        _span("node", "root", (1, 8), **attributes),
        _span("chain", "node", (2, 7)),
        _span("call", "chain", (3, 4), **{"lightning.agent": ""}),
        _span("lost", "nowhere", (3, 4)),
    ]
    by_id = {span.span_id: span for span in spans}
    agents = Agents(by_id)
    for name, agent in {"call": "writer", "root": "team", "lost": "", "chain": "writer"}.items():
        assert agents.of(by_id[name]) == agent


def test_a_circle_of_parents_ends() -> None:
    spans = [_span("a", "b", (0, 1)), _span("b", "a", (0, 1))]
    agents = Agents({span.span_id: span for span in spans})
    assert agents.of(spans[0]) == agents.of(spans[1]) == ""
    assert causes([*spans, _span("tool", "a", (3, 4), **TOOL)])[0][1] is None


def test_a_tool_is_known_by_either_convention() -> None:
    assert is_tool(_span("a", None, (0, 1), **TOOL))
    other = _span("a", None, (0, 1), **{"openinference.span.kind": "TOOL", "output.value": "4"})
    assert is_tool(other) and tool_output(other) == "4"
    assert tool_output(_span("a", None, (0, 1), **TOOL, **{"gen_ai.tool.call.result": "5"})) == "5"
    assert not is_tool(_span("a", None, (0, 1), **CALL))


def test_a_tool_was_asked_for_by_the_last_call_that_had_ended() -> None:
    tool = _span("tool", None, (10, 12), **TOOL)
    early, late = _span("early", None, (0, 3), **CALL), _span("late", None, (4, 9), **CALL)
    running = _span("running", None, (9, 11), **CALL)
    ((_, found),) = causes([late, tool, running, early])
    assert found is late
    assert causes([tool, running]) == [(tool, None)]


def test_parallel_agents_have_separate_tools() -> None:
    spans = [
        _span("left", None, (0, 20)),
        _span("right", None, (0, 20)),
        _span("left call", "left", (1, 3), **CALL),
        _span("right call", "right", (1, 5), **CALL),
        _span("step", "left", (5, 9)),
        _span("left tool", "step", (6, 9), **TOOL),
        _span("right tool", "right", (6, 9), **TOOL),
    ]
    by_id = {span.span_id: span for span in spans}
    found = {tool.span_id: call for tool, call in causes(spans)}
    for side in ("left", "right"):
        assert found[f"{side} tool"] is by_id[f"{side} call"]


def test_a_call_without_a_context_goes_below_the_span_around_it() -> None:
    ours = {**CALL, "lightning.rollout_id": "r"}
    spans = [
        _span("root", None, (0, 99), **{"lightning.rollout_id": "r"}),
        _span("agent", "root", (1, 50)),
        _span("generation", "agent", (5, 20)),
        _span("brief", "agent", (7, 8)),
        _span("loose", "root", (6, 19), **ours),
        _span("choice", "loose", (6, 18), **ours),
        _span("late", "root", (60, 70), **ours),
        _span("known", "agent", (6, 19), **ours),
    ]
    parents = {span.span_id: span.parent_span_id for span in attach_loose_calls(spans)}
    before = {span.span_id: span.parent_span_id for span in spans}
    assert parents == before | {"loose": "generation"}


# The order of a waterfall


def _shape(spans: list[Span]) -> list[tuple[str, int]]:
    return [(span.span_id, depth) for span, depth in in_tree_order(spans)]


@pytest.mark.parametrize(
    ("spans", "shape"),
    [
        # Parents come before children, and siblings by their start.
        (
            [
                ("late", "root", 20),
                ("inner", "early", 12),
                ("early", "root", 10),
                ("root", None, 0),
            ],
            [("root", 0), ("early", 1), ("inner", 2), ("late", 1)],
        ),
        # A span whose parent is missing hangs at the root.
        (
            [("a", None, 0), ("lost", "unknown", 10), ("b", "lost", 20)],
            [("a", 0), ("lost", 0), ("b", 1)],
        ),
        # A circle is broken at its first span.
        (
            [("own", "own", 30), ("x", "y", 10), ("y", "x", 20), ("below", "y", 40)],
            [("own", 0), ("x", 0), ("y", 1), ("below", 2)],
        ),
    ],
)
def test_spans_are_in_the_order_of_their_tree(spans: list[tuple], shape: list[tuple]) -> None:
    made = [_span(name, parent, (start, start + 10)) for name, parent, start in spans]
    assert _shape(made) == shape


def test_a_parent_is_of_the_same_trace() -> None:
    other = Span("another trace", "root", None, "n", 0, 1)
    assert _shape([other, _span("child", "root", (1, 10))]) == [("root", 0), ("child", 0)]


def test_depth_has_no_limit() -> None:
    spans = [_span("0", None, (0, 10))] + [
        _span(str(i), str(i - 1), (0, 10)) for i in range(1, 5000)
    ]
    assert _shape(spans)[-1] == ("4999", 4999)


KINDS: list[dict[str, Any]] = [
    {},
    {attributes.AGENT_NAME: "a"},
    TOOL,
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
def test_every_tree_reads_as_by_the_quadratic_algorithm(spans: list[Span]) -> None:
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
def test_work_grows_with_the_number_of_spans(shape: Callable[[int], list[Span]]) -> None:
    """Eight times the spans run about 13 times the lines; the quadratic algorithm ran 64 times."""

    def cost(size: int) -> int:
        spans, lines = shape(size), 0

        def count(frame: Any, event: str, argument: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return count

        sys.settrace(count)
        try:
            read = attach_loose_calls(spans)
            causes(read)
            agents = Agents({span.span_id: span for span in read})
            for span in read:
                agents.of(span)
        finally:
            sys.settrace(None)
        return lines

    assert cost(800) < 24 * cost(100)


def test_spans_far_above_relate_no_calls() -> None:
    """Give the tool and its call a common ancestor at, and then just beyond, the limit."""
    for depth, cause in ((MAX_DEPTH - 1, "inside"), (MAX_DEPTH, "outside")):
        chain = [_span(f"s{i}", f"s{i - 1}" if i else "root", (0, 9)) for i in range(depth)]
        spans = [
            _span("root", None, (0, 99)),
            *chain,
            _span("inside", "s0", (1, 2), **CALL),
            _span("outside", "root", (3, 4), **CALL),
            _span("tool", f"s{depth - 1}", (5, 6), **TOOL),
        ]
        ((_, call),) = causes(spans)
        assert call is not None and call.span_id == cause
