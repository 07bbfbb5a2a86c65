"""Rewards by component: what a component reads, the weighted sum, and comparisons of rewards.

All functions are pure.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from lightning_jax.rollouts.config import AGENT, RewardConfig
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.types import Message, Metrics, Rollout, Span

Decode = Callable[[Sequence[int]], str]  # token ids to text


@dataclass(frozen=True)
class Attempt:
    """Scored rollout as a component of the reward sees it.

    `transcript` has the text that each call added to the conversation, as a message with the role
    `user`, and its response, with the role `assistant`. Texts of special tokens are left out.
    """

    rollout_id: str
    transcript: tuple[Message, ...]
    spans: tuple[Span, ...] = ()
    reward: float = 0.0  # what the agent returned; 0 if it returned none
    metrics: Mapping[str, float] = field(default_factory=dict)  # other numbers that it returned

    @property
    def response(self) -> str:
        """Text of the last response, or "" if it is empty or the policy answered no call."""
        last = self.transcript[-1] if self.transcript else {"role": "user", "content": ""}
        return "" if last["role"] == "user" else last["content"]


def attempt_of(rollout: Rollout, spans: Sequence[Span], decode: Decode) -> Attempt:
    """Return a rollout as its components see it."""
    calls, _ = spans_to_transitions(spans)
    messages: list[Message] = []
    paths: list[tuple[int, ...]] = []
    for call in calls:
        prompt = call.prompt_token_ids
        num_seen = max((len(path) for path in paths if prompt[: len(path)] == path), default=0)
        for role, ids in (("user", prompt[num_seen:]), ("assistant", call.response_token_ids)):
            if text := decode(ids).strip():
                messages.append({"role": role, "content": text})
        paths.append(prompt + call.response_token_ids)
    reward, metrics = agent_reward(rollout), dict(rollout.metrics)
    return Attempt(rollout.rollout_id, tuple(messages), tuple(spans), reward, metrics)


def agent_reward(rollout: Rollout) -> float:
    """Return what the agent of a scored rollout returned, before any component was added."""
    return rollout.components.get(AGENT, rollout.reward or 0.0)


def weighted_sum(
    components: Mapping[str, float], rewards: Mapping[str, RewardConfig], phase: str
) -> float:
    """Return the reward of a rollout of a phase.

    If none of its components has a weight, as in an evaluation with a judge that compares, it is
    what the agent returned.
    """
    weights = {name: w for name, reward in rewards.items() if (w := reward.weight_in(phase))}
    parts = [weights[name] * value for name, value in components.items() if name in weights]
    return math.fsum(parts) if parts else components.get(AGENT, 0.0)


def component_metrics(rollouts: Sequence[Rollout], prefix: str) -> Metrics:
    """Return the mean and the standard deviation of each component over the scored rollouts."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.components.items():
            values[name].append(value)
    metrics = {}
    for name, column in sorted(values.items()):
        metrics[f"{prefix}{name}_mean"] = fmean(column)
        metrics[f"{prefix}{name}_std"] = float(np.std(column))
    return metrics


# Comparison of two rewards of the same rollouts


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, or None if either has only equal values."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def flipped(first: Sequence[float], second: Sequence[float]) -> list[bool]:
    """Return for each rollout of a group whether its advantage changes its sign.

    The advantage is the reward minus the group's mean. An advantage of 0, up to rounding, has no
    sign.
    """
    signs = [_signs(values) for values in (first, second)]
    return [a * b < 0 for a, b in zip(*signs, strict=True)]


def ranks(values: Sequence[float]) -> np.ndarray:
    """Return ranks from 1. Equal values have the mean of their ranks."""
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[indices]


def _signs(values: Sequence[float]) -> list[int]:
    centre = fmean(values)
    size = max(map(abs, values)) or 1.0
    return [0 if abs(v - centre) <= 1e-9 * size else (1 if v > centre else -1) for v in values]
