"""Spans in, Transitions and Trajectories out: pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_jax.tracing import attributes as names
from lightning_jax.tracing.rewards import posted_rewards
from lightning_jax.tracing.tree import call_order, from_gateway, has_choice_spans
from lightning_jax.types import InvalidValue, Rollout, Span, Trajectory, Transition

# A gradient grows with the inverse of the temperature that it is taken at, so what was sampled
# below this one is learned from at 1.
COLDEST = 0.1


def spans_to_transitions(spans: Sequence[Span]) -> tuple[tuple[Transition, ...], dict[str, int]]:
    """The calls that can be trained on, in order of start; and how many cannot, by reason.

    Reasons are the error codes of failed calls (`call_error` where a span has none),
    `served_elsewhere` for one that another server answered, `empty_response` for a call without a
    prompt or a response, and `no_logprobs` where the server recorded none. Spans that are no call
    to the gateway count as neither. A call with several choices gives one Transition each. Rewards
    that were posted for calls are theirs; `reward_without_call` counts those for calls that are
    not there.
    """
    transitions: list[Transition] = []
    reasons: Counter[str] = Counter()
    rewards, num_lost = posted_rewards(spans)
    if num_lost:
        reasons["reward_without_call"] = num_lost
    for span in sorted(spans, key=call_order):
        if not from_gateway(span):
            continue  # an agent's own instrumentation may tell of the same call once more
        if span.error is not None:
            reasons[str(span.attributes.get(names.ERROR_TYPE, "call_error"))] += 1
        elif has_choice_spans(span):
            continue
        elif names.SERVED_BY in span.attributes:
            reasons["served_elsewhere"] += 1
        elif not (
            span.attributes.get(names.PROMPT_TOKEN_IDS)
            and span.attributes.get(names.RESPONSE_TOKEN_IDS)
        ):
            reasons["empty_response"] += 1
        elif names.BEHAVIOR_LOGPROBS not in span.attributes:
            reasons["no_logprobs"] += 1
        else:
            transitions.append(_transition(span, rewards.get(span.span_id, 0.0)))
    return tuple(transitions), dict(reasons)


def to_trajectory(rollout: Rollout, transitions: Sequence[Transition]) -> Trajectory:
    """The rollout's calls with its reward. Raises ValueError for a rollout that has none."""
    if rollout.reward is None:
        raise InvalidValue(
            f"rollout {rollout.rollout_id!r} is {rollout.status}; expected one that has a reward.",
            reason="no_reward",
            key=rollout.rollout_id,
        )
    return Trajectory(rollout.rollout_id, rollout.group_id, tuple(transitions), rollout.reward)


def _transition(span: Span, posted: float) -> Transition:
    values = span.attributes
    return Transition(
        call_id=span.span_id,
        rollout_id=str(values.get(names.ROLLOUT_ID, "")),
        prompt_token_ids=tuple(values[names.PROMPT_TOKEN_IDS]),
        response_token_ids=tuple(values[names.RESPONSE_TOKEN_IDS]),
        behavior_logprobs=tuple(values[names.BEHAVIOR_LOGPROBS]),
        sampling_logprobs=tuple(values[names.SAMPLING_LOGPROBS]),
        policy_versions=tuple(values[names.POLICY_VERSIONS]),
        finish_reason=values[names.RESPONSE_FINISH_REASONS][0],
        agent=str(values.get(names.AGENT, "")),
        policy=str(values.get(names.POLICY, "policy")),
        reward=float(values.get(names.REWARD, 0.0)) + posted,
        forced=tuple(values.get(names.FORCED, ())),
        answered_by=str(values.get(names.ANSWERED_BY, "")),
        **_tempered(values),
    )


def _tempered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing at temperature 1, or as good as greedy."""
    temperature = float(values.get(names.REQUEST_TEMPERATURE, 1.0))
    if names.TEMPERED_LOGPROBS not in values or temperature < COLDEST:
        return {}
    return {
        "temperature": temperature,
        "tempered_logprobs": tuple(values[names.TEMPERED_LOGPROBS]),
    }
