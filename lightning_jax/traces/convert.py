"""Pure functions from Spans to Transitions and Trajectories."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.traces import attributes
from lightning_jax.traces.rewards import posted_rewards
from lightning_jax.traces.tree import call_order, from_gateway, has_choice_spans
from lightning_jax.types import Rollout, Span, Trajectory, Transition

# Gradients scale with the inverse temperature, so samples below this temperature are trained on
# at 1.
COLDEST = 0.1
# A token that is likelier than this only under its grammar was not chosen by the policy. Its
# gradient is nearly 0, but the unmasked policy's is large.
NEARLY_FORCED = 0.999


def spans_to_transitions(spans: Sequence[Span]) -> tuple[tuple[Transition, ...], dict[str, int]]:
    """Return the trainable calls in order of start, and the number of other calls by reason.

    Reasons:

    * The error code of a failed call, or `call_error` if its span has none.
    * `served_elsewhere`: another server answered the call.
    * `empty_response`: the call has no prompt or no response.
    * `no_logprobs`: the server recorded no log-probabilities.
    * `reward_without_call`: a reward was posted for a call that does not exist.

    Spans that are not calls to the gateway are ignored. A call with several choices becomes one
    Transition for each. Rewards posted for a call are added to its own.
    """
    transitions: list[Transition] = []
    reasons: Counter[str] = Counter()
    rewards, num_lost = posted_rewards(spans)
    if num_lost:
        reasons["reward_without_call"] = num_lost
    for span in sorted(spans, key=call_order):
        if not from_gateway(span):
            continue  # an agent's own instrumentation may record the same call again
        if span.error is not None:
            reasons[str(span.attributes.get(attributes.ERROR_TYPE, "call_error"))] += 1
        elif has_choice_spans(span):
            continue
        elif attributes.SERVED_BY in span.attributes:
            reasons["served_elsewhere"] += 1
        elif not (
            span.attributes.get(attributes.PROMPT_TOKEN_IDS)
            and span.attributes.get(attributes.RESPONSE_TOKEN_IDS)
        ):
            reasons["empty_response"] += 1
        elif attributes.BEHAVIOR_LOGPROBS not in span.attributes:
            reasons["no_logprobs"] += 1
        else:
            transitions.append(_transition(span, rewards.get(span.span_id, 0.0)))
    return tuple(transitions), dict(reasons)


def to_trajectory(rollout: Rollout, transitions: Sequence[Transition]) -> Trajectory:
    """Return the rollout's calls with its reward. Raise ValueError if the rollout has none."""
    if rollout.reward is None:
        raise InvalidValue(
            f"rollout {rollout.rollout_id!r} is {rollout.status} and has no reward; pass a scored "
            "rollout.",
            reason="no_reward",
            key=rollout.rollout_id,
        )
    return Trajectory(
        rollout.rollout_id,
        rollout.group_id,
        tuple(transitions),
        rollout.reward,
        is_failed=rollout.status == "agent_failure",
    )


def _transition(span: Span, posted: float) -> Transition:
    values = span.attributes
    return Transition(
        call_id=span.span_id,
        rollout_id=str(values.get(attributes.ROLLOUT_ID, "")),
        prompt_token_ids=tuple(values[attributes.PROMPT_TOKEN_IDS]),
        response_token_ids=tuple(values[attributes.RESPONSE_TOKEN_IDS]),
        behavior_logprobs=tuple(values[attributes.BEHAVIOR_LOGPROBS]),
        sampling_logprobs=tuple(values[attributes.SAMPLING_LOGPROBS]),
        policy_versions=tuple(values[attributes.POLICY_VERSIONS]),
        finish_reason=values[attributes.RESPONSE_FINISH_REASONS][0],
        agent=str(values.get(attributes.AGENT, "")),
        policy=str(values.get(attributes.POLICY, "policy")),
        reward=float(values.get(attributes.REWARD, 0.0)) + posted,
        answered_by=str(values.get(attributes.ANSWERED_BY, "")),
        max_tokens=values.get(attributes.REQUEST_MAX_TOKENS),
        **_tempered(values),
        **_masked(values),
    )


def _tempered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the temperature fields, or nothing if the temperature is 1 or nearly greedy."""
    temperature = float(values.get(attributes.REQUEST_TEMPERATURE, 1.0))
    if attributes.TEMPERED_LOGPROBS not in values or temperature < COLDEST:
        return {}
    return {
        "temperature": temperature,
        "tempered_logprobs": tuple(values[attributes.TEMPERED_LOGPROBS]),
    }


def _masked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return which tokens a grammar forced, and the grammar if it alone shaped the samples."""
    forced = tuple(values.get(attributes.FORCED, ()))
    grammar = values.get(attributes.GRAMMAR)
    if grammar is None or float(values.get(attributes.REQUEST_TEMPERATURE, 1.0)) < COLDEST:
        return {"forced": forced}
    policy = values.get(attributes.TEMPERED_LOGPROBS, values[attributes.BEHAVIOR_LOGPROBS])
    under_grammar, least = values[attributes.SAMPLING_LOGPROBS], math.log(NEARLY_FORCED)
    nearly = [masked > least >= free for free, masked in zip(policy, under_grammar, strict=True)]
    forced = forced or (False,) * len(nearly)
    return {
        "forced": tuple(a or b for a, b in zip(forced, nearly, strict=True)),
        "grammar": str(grammar),
    }
