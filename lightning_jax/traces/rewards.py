"""Rewards of single calls: posted while a rollout ran, or given by rules.

A rule maps a fact in a rollout's spans (a tool failed, a response was cut short, ...) to a reward
for the call that caused it. All functions are pure.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from lightning_jax.traces import attributes
from lightning_jax.traces.config import RewardRule
from lightning_jax.traces.tree import causes, is_gateway_call, tool_output
from lightning_jax.types import Span, Transition

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class RewardEvent:
    """Something that a call caused."""

    fact: str
    call_id: str
    text: str = ""


def apply_rules(
    spans: Sequence[Span],
    transitions: Sequence[Transition],
    rules: Mapping[str, RewardRule],
    decode: Decode,
) -> tuple[tuple[Transition, ...], dict[str, int]]:
    """Return the calls with the rules' rewards added, and the number of uses by rule name.

    `transitions` are the calls of `spans`, in order. A rule applies once for each event that it
    matches. If the call that caused an event is not in `transitions`, count `NAME_without_call`.
    """
    calls = {call.call_id: call for call in transitions}
    counts: Counter[str] = Counter()
    for event in find_events(spans, transitions, {rule.fact for rule in rules.values()}, decode):
        call = calls.get(event.call_id)
        for name, rule in rules.items():
            if not _fits(rule, event, call.agent if call else ""):
                continue
            if call is None:
                counts[f"{name}_without_call"] += 1
            else:
                counts[name] += 1
                call = replace(call, reward=call.reward + rule.reward)
                calls[event.call_id] = call
    return tuple(calls[call.call_id] for call in transitions), dict(counts)


def posted_rewards(spans: Sequence[Span]) -> tuple[dict[str, float], int]:
    """Return the sums of posted rewards, and the number of posts for a call that does not exist.

    Sums are by the id of the span that holds the call's tokens.
    """
    by_response = {s.attributes.get(attributes.RESPONSE_ID): s for s in spans if is_gateway_call(s)}
    choices = {
        (span.parent_span_id, span.attributes.get(attributes.CHOICE_INDEX)): span for span in spans
    }
    rewards: Counter[str] = Counter()
    num_lost = 0
    for span in spans:
        if attributes.REWARD_CALL not in span.attributes:
            continue
        call = by_response.get(span.attributes[attributes.REWARD_CALL])
        if call is None:
            num_lost += 1
            continue
        index = int(span.attributes.get(attributes.REWARD_CHOICE, 0))
        holder = choices.get((call.span_id, index), call)
        rewards[holder.span_id] += span.attributes[attributes.REWARD]
    return dict(rewards), num_lost


def observation(call: Transition, transitions: Sequence[Transition], decode: Decode) -> str | None:
    """Return the text that the agent gave the policy after the call, or None if it did not
    continue.

    It is the text that the first later prompt adds to the call's prompt and response.
    """
    path = call.prompt_token_ids + call.response_token_ids
    later = iter(transitions)
    for candidate in later:
        if candidate.call_id == call.call_id:
            break
    for candidate in later:
        if candidate.prompt_token_ids[: len(path)] == path:
            return decode(candidate.prompt_token_ids[len(path) :])
    return None


def find_events(
    spans: Sequence[Span], transitions: Sequence[Transition], facts: set[str], decode: Decode
) -> Iterator[RewardEvent]:
    """Yield events for the requested facts only, because finding them takes time."""
    if facts & {"tool_error", "tool_timeout", "tool_output"}:
        yield from _tool_events(spans)
    if "malformed_call" in facts:
        for span in spans:
            for _ in range(int(span.attributes.get(attributes.MALFORMED_TOOL_CALLS, 0))):
                yield RewardEvent("malformed_call", span.span_id)
    for call in transitions:
        if "cut_short" in facts and call.finish_reason == "length":
            yield RewardEvent("cut_short", call.call_id)
        if "response" in facts:
            yield RewardEvent("response", call.call_id, decode(call.response_token_ids))
        if "observation" in facts:
            text = observation(call, transitions, decode)
            if text is not None:
                yield RewardEvent("observation", call.call_id, text)


def _tool_events(spans: Sequence[Span]) -> Iterator[RewardEvent]:
    for span, cause in causes(spans):
        call_id = cause.span_id if cause else ""
        if span.error is not None:
            reason = f"{span.attributes.get(attributes.ERROR_TYPE, '')} {span.error}".strip()
            yield RewardEvent("tool_error", call_id, reason)
            if re.search(r"time[d\s_-]*out", reason, re.I):
                yield RewardEvent("tool_timeout", call_id, reason)
        elif output := tool_output(span):
            yield RewardEvent("tool_output", call_id, output)


def _fits(rule: RewardRule, event: RewardEvent, agent: str) -> bool:
    return (
        rule.fact == event.fact
        and (rule.pattern is None or re.search(rule.pattern, event.text, re.M) is not None)
        and (rule.agent is None or fnmatchcase(agent, rule.agent))
    )
