"""The spans of a rollout as one tree: which agent called, and which call had a tool run.

Spans come from the gateway and, over OTLP, from whatever the agent's framework is instrumented
with. Frameworks name things by OpenTelemetry's GenAI conventions or by OpenInference's; both are
read.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from lightning_jax.tracing import attributes as names
from lightning_jax.types import Span

AGENT_NAMES = (names.AGENT, names.AGENT_NAME, "agent.name", "graph.node.id")
TOOL_OUTPUTS = (names.TOOL_RESULT, names.OUTPUT)


def from_gateway(span: Span) -> bool:
    """Whether the gateway recorded it: a call to the policy, or one of a call's choices. No agent
    can send such a span; see otlp.py.
    """
    return names.POLICY in span.attributes


def is_gateway_call(span: Span) -> bool:
    """Whether it is a call to the gateway; of one with several choices the call itself."""
    return from_gateway(span) and names.CHOICE_INDEX not in span.attributes


def has_choice_spans(span: Span) -> bool:
    """Whether it is a call of several choices, whose tokens its child spans hold."""
    count = int(span.attributes.get(names.REQUEST_CHOICE_COUNT, 1))
    return count > 1 and names.CHOICE_INDEX not in span.attributes


def call_order(span: Span) -> tuple[int, int, int]:
    """Return a key that sorts calls by their beginning, and the choices of one call by number.

    The clock decides only in stores older than schema version 4, whose spans have no sequence.
    """
    choice = int(span.attributes.get(names.CHOICE_INDEX, 0))
    return (0, span.start_ns, choice) if span.sequence is None else (span.sequence, 0, choice)


def is_tool(span: Span) -> bool:
    """Whether it is the run of a tool."""
    kind = str(span.attributes.get(names.SPAN_KIND, ""))
    return span.attributes.get(names.OPERATION_NAME) == names.EXECUTE_TOOL or kind == "TOOL"


def tool_output(span: Span) -> str:
    """What the tool gave back, "" where its span does not say."""
    return _first_text(span.attributes, TOOL_OUTPUTS)


def placed(spans: Sequence[Span]) -> list[Span]:
    """The spans, with each call that came without a trace context below the span of the agent's own
    that encloses it in time, the one that began last.

    Instrumentation often makes a span around a call and does not send its context along.
    """
    roots = {span.span_id for span in spans if span.parent_span_id is None}
    theirs = [span for span in spans if names.ROLLOUT_ID not in span.attributes]
    return [_placed(span, theirs) if _is_loose(span, roots) else span for span in spans]


def ancestors(span: Span, by_id: Mapping[str, Span]) -> Iterator[Span]:
    """The span itself, its parent, and so on up to the root."""
    seen: set[str] = set()
    at: Span | None = span
    while at is not None and at.span_id not in seen:  # a client may send a circle
        seen.add(at.span_id)
        yield at
        at = by_id.get(at.parent_span_id or "")


def agent_of(span: Span, by_id: Mapping[str, Span]) -> str:
    """The agent that the span, or else the nearest span above it, names; "" if none does."""
    for each in ancestors(span, by_id):
        if name := _first_text(each.attributes, AGENT_NAMES):
            return name
    return ""


def causes(spans: Sequence[Span]) -> list[tuple[Span, Span | None]]:
    """Each run of a tool with the call that asked for it: the last one that had ended when the tool
    began.

    Of calls below the same parent, if there are such: sub-agents run side by side, and each has
    calls of its own. None where no call had ended.
    """
    by_id = {span.span_id: span for span in spans}
    calls = sorted((span for span in spans if _holds_tokens(span)), key=lambda span: span.end_ns)
    paths = [{above.span_id for above in ancestors(call, by_id)} for call in calls]

    def cause(tool: Span) -> Span | None:
        ended = [pair for pair in zip(calls, paths, strict=True) if pair[0].end_ns <= tool.start_ns]
        for above in list(ancestors(tool, by_id))[1:]:
            inside = [call for call, path in ended if above.span_id in path]
            if inside:
                return inside[-1]
        return ended[-1][0] if ended else None

    return [(span, cause(span)) for span in spans if is_tool(span)]


def _holds_tokens(span: Span) -> bool:
    return names.RESPONSE_TOKEN_IDS in span.attributes


def _is_loose(span: Span, roots: Set[str]) -> bool:
    """Whether a call to the gateway is known only to belong to its rollout."""
    return from_gateway(span) and (span.parent_span_id or "") in {*roots, ""}


def _placed(call: Span, theirs: Sequence[Span]) -> Span:
    around = [s for s in theirs if s.start_ns <= call.start_ns and call.end_ns <= s.end_ns]
    above = max(around, key=lambda span: (span.start_ns, -span.end_ns), default=None)
    return call if above is None else replace(call, parent_span_id=above.span_id)


def _first_text(attributes: Mapping[str, Any], keys: Sequence[str]) -> str:
    return next((str(attributes[key]) for key in keys if attributes.get(key)), "")
