"""Spans of a rollout as one tree: the agent of each call, and the call that caused each tool run.

Spans come from the gateway and, over OTLP, from the instrumentation of the agent's framework.
Frameworks use names from OpenTelemetry's GenAI conventions or from OpenInference, so both are read.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from lightning_jax.traces import attributes
from lightning_jax.types import Span

AGENT_NAMES = (attributes.AGENT, attributes.AGENT_NAME, "agent.name", "graph.node.id")
TOOL_OUTPUTS = (attributes.TOOL_RESULT, attributes.OUTPUT)
MAX_DEPTH = 100  # spans above a call or a tool that relate them; agents may send one long chain


def from_gateway(span: Span) -> bool:
    """Return whether the gateway recorded the span: a call to the policy, or a choice of one.

    Agents cannot send such a span; see otlp.py.
    """
    return attributes.POLICY in span.attributes


def is_gateway_call(span: Span) -> bool:
    """Return whether the span is a call to the gateway, but not one of its choices."""
    return from_gateway(span) and attributes.CHOICE_INDEX not in span.attributes


def has_choice_spans(span: Span) -> bool:
    """Return whether the span is a call with several choices, whose child spans hold the tokens."""
    count = int(span.attributes.get(attributes.REQUEST_CHOICE_COUNT, 1))
    return count > 1 and attributes.CHOICE_INDEX not in span.attributes


def call_order(span: Span) -> tuple[int, int, int]:
    """Return a key that sorts calls by their start, and the choices of one call by index.

    The clock decides only in stores older than schema version 4, whose spans have no sequence.
    """
    choice = int(span.attributes.get(attributes.CHOICE_INDEX, 0))
    return (0, span.start_ns, choice) if span.sequence is None else (span.sequence, 0, choice)


def is_tool(span: Span) -> bool:
    """Return whether the span is a tool run."""
    kind = str(span.attributes.get(attributes.SPAN_KIND, ""))
    return (
        span.attributes.get(attributes.OPERATION_NAME) == attributes.EXECUTE_TOOL or kind == "TOOL"
    )


def tool_output(span: Span) -> str:
    """Return the tool's output, or "" if its span has none."""
    return _first_text(span.attributes, TOOL_OUTPUTS)


def attach_loose_calls(spans: Sequence[Span]) -> list[Span]:
    """Return the spans, with calls that came without a trace context moved below the agent's spans.

    Such a call goes below the span that encloses it in time and began last. Instrumentation often
    makes a span around a call without sending its context.
    """
    roots = {"", *(span.span_id for span in spans if span.parent_span_id is None)}
    loose = [
        index
        for index, span in enumerate(spans)
        if from_gateway(span) and (span.parent_span_id or "") in roots
    ]
    theirs = [span for span in spans if attributes.ROLLOUT_ID not in span.attributes]
    attached = list(spans)
    for index, above in zip(loose, _around([spans[index] for index in loose], theirs), strict=True):
        if above is not None:
            attached[index] = replace(spans[index], parent_span_id=above.span_id)
    return attached


def ancestors(span: Span, by_id: Mapping[str, Span]) -> Iterator[Span]:
    """Yield the span itself, its parent, and so on up to the root."""
    seen: set[str] = set()
    current: Span | None = span
    while current is not None and current.span_id not in seen:  # a client may send a cycle
        seen.add(current.span_id)
        yield current
        current = by_id.get(current.parent_span_id or "")


class Agents:
    """Agent of each span. The result for a span is reused for the spans below it."""

    def __init__(self, by_id: Mapping[str, Span]) -> None:
        self._by_id = by_id
        self._known: dict[str, str] = {}

    def of(self, span: Span) -> str:
        """Return the agent named by the span or else by its nearest ancestor, or "" if none is."""
        name, nameless = "", []
        for ancestor in ancestors(span, self._by_id):
            name = _first_text(ancestor.attributes, AGENT_NAMES)
            if name or ancestor.span_id in self._known:
                name = name or self._known[ancestor.span_id]
                break
            nameless.append(ancestor.span_id)
        self._known |= dict.fromkeys(nameless, name)
        return name


def causes(spans: Sequence[Span]) -> list[tuple[Span, Span | None]]:
    """Return each tool run with the call that requested it, or None if no call had ended.

    It is the last call that had ended when the tool began, if possible below the same parent, or
    else below the next span above both, up to MAX_DEPTH. Sub-agents run in parallel, and each has
    its own calls.
    """
    by_id = {span.span_id: span for span in spans}
    with_tokens = (s for s in spans if attributes.RESPONSE_TOKEN_IDS in s.attributes)
    calls = sorted(with_tokens, key=lambda call: call.end_ns)
    below: dict[str, list[Span]] = defaultdict(list)  # calls at or below each span, by their end
    for call in calls:
        for ancestor in islice(ancestors(call, by_id), MAX_DEPTH):
            below[ancestor.span_id].append(call)

    def cause(tool: Span) -> Span | None:
        above = [span.span_id for span in islice(ancestors(tool, by_id), 1, MAX_DEPTH)]
        for candidates in (*(below[span_id] for span_id in above if span_id in below), calls):
            number = bisect_right(candidates, tool.start_ns, key=lambda call: call.end_ns)
            if number:
                return candidates[number - 1]
        return None

    return [(span, cause(span)) for span in spans if is_tool(span)]


def _around(calls: Sequence[Span], theirs: Sequence[Span]) -> list[Span | None]:
    """Return for each call the span that encloses it in time and began last, or None.

    Of spans that began together, it is the one that ends first. Of equal ones, it is the first.
    """
    begun = sorted(reversed(theirs), key=lambda span: (span.start_ns, -span.end_ns))
    parents: list[Span | None] = [None] * len(calls)
    open_spans: list[Span] = []  # without spans that end before one that began later
    ends: list[int] = []  # of `open_spans`, negative for `bisect`
    num_begun = 0
    for index in sorted(range(len(calls)), key=lambda index: calls[index].start_ns):
        call = calls[index]
        while num_begun < len(begun) and begun[num_begun].start_ns <= call.start_ns:
            span = begun[num_begun]
            while open_spans and open_spans[-1].end_ns <= span.end_ns:
                open_spans.pop()
                ends.pop()
            open_spans.append(span)
            ends.append(-span.end_ns)
            num_begun += 1
        num_around = bisect_right(ends, -call.end_ns)
        parents[index] = open_spans[num_around - 1] if num_around else None
    return parents


def _first_text(attributes: Mapping[str, Any], keys: Sequence[str]) -> str:
    return next((str(attributes[key]) for key in keys if attributes.get(key)), "")


def in_tree_order(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Return (span, depth) pairs, parents before children and siblings by start time.

    A span goes to the root if its parent is missing or is below the span itself. Each span comes
    once.
    """
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    children: defaultdict[tuple[str, str] | None, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        parent = (span.trace_id, span.parent_span_id or "")
        is_there = parent in by_id and span.parent_span_id != span.span_id
        children[parent if is_there else None].append(span)
    ordered: dict[tuple[str, str], tuple[Span, int]] = {}
    roots = children[None]
    while True:
        waiting = [(span, 0) for span in reversed(roots)]
        while waiting:  # not recursive: agents may nest spans to any depth
            span, depth = waiting.pop()
            key = (span.trace_id, span.span_id)
            if key not in ordered:
                ordered[key] = (span, depth)
                waiting += [(child, depth + 1) for child in reversed(children[key])]
        circles = [span for key, span in by_id.items() if key not in ordered]
        if not circles:
            return list(ordered.values())
        roots = [min(circles, key=lambda span: span.start_ns)]
