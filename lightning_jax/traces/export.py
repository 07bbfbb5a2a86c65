"""Spans of a finished rollout as one trace for other tools, in OpenTelemetry's GenAI conventions.

Token ids and log-probabilities are not part of it. All functions are pure.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from lightning_jax.traces import attributes
from lightning_jax.traces.otlp import clip
from lightning_jax.traces.rewards import posted_rewards
from lightning_jax.traces.tree import attach_loose_calls, from_gateway, in_tree_order, is_tool
from lightning_jax.types import Rollout, Span

PROVIDER = "lightning_jax"
MAX_NUMBERS = 100  # of a rollout's components, and of its other numbers
# Attributes with an item for each token, and what only the trainer reads.
INTERNAL = frozenset(
    {attributes.PROMPT_TOKEN_IDS, attributes.RESPONSE_TOKEN_IDS, attributes.BEHAVIOR_LOGPROBS}
    | {attributes.SAMPLING_LOGPROBS, attributes.TEMPERED_LOGPROBS, attributes.POLICY_VERSIONS}
    | {attributes.FORCED, attributes.GRAMMAR}
)
# Texts of our own spans that are content.
CONTENT = frozenset(
    {attributes.INPUT, attributes.OUTPUT, attributes.PROMPTS, attributes.DETAIL}
    | {attributes.INPUT_MESSAGES, attributes.OUTPUT_MESSAGES}
    | {attributes.CHAT_TEMPLATE_KWARGS, attributes.REQUEST_STOP_SEQUENCES}
)
# Texts of an agent's spans that are no content. Any other text may be.
NAMES = frozenset(
    {attributes.OPERATION_NAME, attributes.PROVIDER_NAME, attributes.AGENT_NAME}
    | {attributes.REQUEST_MODEL, attributes.RESPONSE_MODEL, attributes.RESPONSE_ID}
    | {attributes.TOOL_NAME, attributes.TOOL_CALL_ID, attributes.TOOL_TYPE, attributes.ERROR_TYPE}
    | {attributes.RESPONSE_FINISH_REASONS, attributes.SPAN_KIND, "tool.name", "agent.name"}
    | {"graph.node.id", "llm.model_name", "llm.provider", "llm.system"}
)

Describe = Callable[[Span], Mapping[str, Any]]  # from a call to the attributes of its messages


@dataclass(frozen=True)
class FinishedRollout:
    """Rollout with its spans and the fields of its task, and numbers of its calls by span id.

    `agent` is the name that the settings give its agent.
    """

    rollout: Rollout
    spans: Sequence[Span]
    task: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    agent: str = ""


def to_trace(finished: FinishedRollout, describe: Describe | None) -> list[Span]:
    """Return the spans of the rollout's trace, the root first and parents before children.

    All have the trace id of the root. A span whose parent is not there is below the root. Without
    `describe` no text is part of it that an agent, a policy, a tool or a task may have written.
    """
    posted, _ = posted_rewards(finished.spans)
    rest = [s for s in finished.spans if attributes.REWARD_CALL not in s.attributes]
    root = next((s for s in rest if _is_root(s)), None) or _missing_root(finished.rollout, rest)
    rest = attach_loose_calls([root, *(span for span in rest if span is not root)])
    ids = {(root.trace_id, root.span_id): root.span_id}
    by_span_id = {root.span_id: root.span_id}
    trace = [_root(finished, root, describe is not None)]
    for span, _ in in_tree_order(rest):
        key = (span.trace_id, span.span_id)
        if key in ids:
            continue
        parent = span.parent_span_id or ""
        above = ids.get((span.trace_id, parent)) or by_span_id.get(parent) or root.span_id
        ids[key] = span.span_id if span.span_id not in by_span_id else _digest(*key)[:16]
        by_span_id.setdefault(span.span_id, ids[key])
        numbers = finished.numbers.get(span.span_id, {})
        if span.span_id in posted:
            numbers = {attributes.REWARD: posted[span.span_id], **numbers}
        trace.append(
            replace(
                _times_within(span, root),
                trace_id=root.trace_id,
                span_id=ids[key],
                parent_span_id=above,
                attributes=_attributes(span, root, numbers, describe),
                error=_error(span, describe is not None),
            )
        )
    return trace


def _is_root(span: Span) -> bool:
    """Return whether it is the span of the rollout itself, which agents cannot send."""
    is_ours = attributes.ROLLOUT_ID in span.attributes and not from_gateway(span)
    return is_ours and span.parent_span_id is None


def _missing_root(rollout: Rollout, spans: Sequence[Span]) -> Span:
    """Return a root around the spans, with ids that are the same each time."""
    digest = _digest(rollout.rollout_id, *(span.span_id for span in spans[:1]))
    start = min((span.start_ns for span in spans if span.start_ns > 0), default=0)
    end = max((span.end_ns for span in spans), default=start)
    return Span(digest[:32], digest[32:48], None, "rollout", start, end)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()


def _times_within(span: Span, root: Span) -> Span:
    """Return the span with its times, or the root's start where an agent sent none."""
    start = span.start_ns if span.start_ns > 0 else root.start_ns
    return replace(span, start_ns=start, end_ns=max(span.end_ns, start))


def _root(finished: FinishedRollout, root: Span, has_content: bool) -> Span:
    rollout, agent = finished.rollout, finished.agent
    values: dict[str, Any] = {
        attributes.OPERATION_NAME: attributes.INVOKE_AGENT,
        attributes.PROVIDER_NAME: PROVIDER,
        attributes.AGENT_NAME: agent or None,
        attributes.SPAN_KIND: "AGENT",
        attributes.ROLLOUT_ID: rollout.rollout_id,
        attributes.TASK_ID: rollout.task_id,
        attributes.GROUP_ID: rollout.group_id,
        attributes.PHASE: rollout.phase,
        attributes.STEP: rollout.step,
        attributes.ATTEMPT: rollout.attempt,
        attributes.STATUS: rollout.status,
        attributes.REASON: rollout.reason,
        attributes.ERROR_TYPE: None if rollout.status == "scored" else rollout.reason,
        attributes.REWARD: rollout.reward,
        attributes.VERSION: _newest(finished.spans),
    }
    name = attributes.ADVANTAGE
    advantages = [numbers[name] for numbers in finished.numbers.values() if name in numbers]
    if advantages:
        values[name] = sum(advantages) / len(advantages)
    for prefix, numbers in (
        (attributes.COMPONENT_PREFIX, rollout.components),
        (attributes.METRIC_PREFIX, rollout.metrics),
    ):
        values |= {f"{prefix}{k}": v for k, v in islice(numbers.items(), MAX_NUMBERS)}
    if has_content:
        task = json.dumps(dict(finished.task), ensure_ascii=False) if finished.task else None
        values[attributes.DETAIL] = rollout.detail
        values[attributes.INPUT] = task
        values[attributes.PROMPTS] = root.attributes.get(attributes.PROMPTS)
    failure = rollout.detail if has_content else rollout.reason
    return replace(
        root,
        parent_span_id=None,
        name=f"{attributes.INVOKE_AGENT} {agent}".rstrip(),
        attributes={key: value for key, value in values.items() if value is not None},
        error=None if rollout.status == "scored" else failure or rollout.status,
    )


def _newest(spans: Sequence[Span]) -> int | None:
    versions = (span.attributes.get(attributes.POLICY_VERSIONS, ()) for span in spans)
    return max((version for of_span in versions for version in of_span), default=None)


def _attributes(
    span: Span, root: Span, numbers: Mapping[str, float], describe: Describe | None
) -> dict[str, Any]:
    """Return the attributes of a span below the root."""
    is_ours = from_gateway(span)
    kept = {key: value for key, value in span.attributes.items() if key not in INTERNAL}
    if describe is None:
        kept = {k: v for k, v in kept.items() if _is_no_content(k, v, is_ours)}
    if span.trace_id != root.trace_id:
        kept[attributes.ORIGINAL_TRACE_ID] = span.trace_id
    if is_ours:
        kept = {key: value for key, value in kept.items() if value != ""}
        kept[attributes.SPAN_KIND] = "LLM"
        kept.setdefault(attributes.PROVIDER_NAME, PROVIDER)
        if (version := _newest([span])) is not None:
            kept[attributes.VERSION] = version
        if describe is not None:
            kept |= {key: value for key, value in describe(span).items() if value is not None}
    elif is_tool(span):
        kept.setdefault(attributes.OPERATION_NAME, attributes.EXECUTE_TOOL)
        kept.setdefault(attributes.TOOL_NAME, str(kept.get("tool.name", span.name)))
        kept.setdefault(attributes.SPAN_KIND, "TOOL")
    return kept | dict(numbers)


def _is_no_content(key: str, value: Any, is_ours: bool) -> bool:
    return key not in CONTENT and (is_ours or key in NAMES or isinstance(value, bool | int | float))


def _error(span: Span, has_content: bool) -> str | None:
    """Return the message of a failed span, or its type without content."""
    if span.error is None or has_content:
        return span.error and clip(span.error)
    return str(span.attributes.get(attributes.ERROR_TYPE, "error"))
