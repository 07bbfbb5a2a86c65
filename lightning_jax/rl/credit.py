"""Credit assignment: the share of a rollout's reward that each LLM call is responsible for."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Float

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.choices import choose, wrong_result
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.gae import CallValues, rollout_gae
from lightning_jax.rl.token_weights import drop_calls, num_trained
from lightning_jax.types import Advantage, Trajectory, Transition

CUT_SHORT = "length"  # finish reason of a response that a limit cut

CreditScheme = Callable[[Trajectory], tuple[Advantage, ...]]


@dataclass(frozen=True)
class Credit:
    """Rollouts of a step with their credit, which is assigned once and carried along."""

    trajectories: Sequence[Trajectory]
    calls: list[tuple[Advantage, ...]]  # of each rollout, one per transition, in reward units
    returns: Float[np.ndarray, " N"]  # of each rollout, without a critic


def identical() -> CreditScheme:
    """Give every call the rollout's reward plus all call rewards (arXiv 2508.03680)."""

    def credit(trajectory: Trajectory) -> tuple[float, ...]:
        whole = trajectory.reward + math.fsum(t.reward for t in trajectory.transitions)
        return (whole,) * len(trajectory.transitions)

    return credit


def per_step(discount: float = 1.0) -> CreditScheme:
    """Give call t the sum of `discount^(k-t) * r_k` over k >= t.

    The rollout's reward is earned at its last call.
    """

    def credit(trajectory: Trajectory) -> tuple[float, ...]:
        rewards = [t.reward for t in trajectory.transitions]
        if rewards:
            rewards[-1] += trajectory.reward
        # Backwards: G_t = r_t + discount * G_{t+1}.
        returns = itertools.accumulate(reversed(rewards), lambda later, r: r + discount * later)
        return tuple(returns)[::-1]

    return credit


def learned(
    discount: float = 1.0, gae_lambda: float = 1.0, *, per_token: bool = False
) -> Callable[[Trajectory, Sequence[CallValues] | None], tuple[Advantage, ...]]:
    """Estimate generalized advantages over a rollout's calls or trained tokens (arXiv 1506.02438).

    The scheme also takes the critic's values of the states, None for 0. A call without trained
    tokens has one credit. With `gae_lambda` 1 and values of 0, the credit of calls equals that of
    `per_step`. It also equals `identical` if nothing is discounted and no call has its own reward.
    """

    def credit(
        trajectory: Trajectory, values: Sequence[CallValues] | None
    ) -> tuple[Advantage, ...]:
        calls = rollout_gae(
            trajectory, values, per_token=per_token, discount=discount, lam=gae_lambda
        )
        return tuple(advantages if per_token else advantages[0] for advantages, _ in calls)

    return credit


SCHEMES: dict[str, Callable[[AlgorithmConfig], Callable[..., tuple[Advantage, ...]]]] = {
    "identical": lambda _: identical(),
    "per_step": lambda a: per_step(a.discount),
    "turn_groups": lambda a: per_step(a.discount),  # but `advantages` compares calls of a turn
    "learned": lambda a: learned(a.discount, a.gae_lambda),
    "learned_token": lambda a: learned(a.discount, a.gae_lambda, per_token=True),
}


def assign_credit(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    values: Sequence[Sequence[CallValues]] | None = None,
) -> Credit:
    """Assign the credit of `algorithm.credit`, with the critic's values if there is a critic.

    A rollout's return is the credit of its first call, or its reward alone if it made no call. With
    a critic, it is the discounted sum of its rewards. Raises ValueError for a call reward that is
    not finite.
    """
    for trajectory in trajectories:
        for call in trajectory.transitions:
            if not math.isfinite(call.reward):
                raise InvalidValue(
                    f"call {call.call_id!r} of rollout {trajectory.rollout_id!r} has reward "
                    f"{call.reward}; rewards must be finite",
                    reason="not_finite",
                    key=call.call_id,
                )
    scheme = choose(algorithm, "credit", SCHEMES)
    if algorithm.has_critic:
        values_of = [None] * len(trajectories) if values is None else values
        calls = [scheme(*pair) for pair in zip(trajectories, values_of, strict=True)]
        plain = choose(replace(algorithm, gae_lambda=1.0), "credit", SCHEMES)
        first = [plain(trajectory, None) for trajectory in trajectories]
    else:
        calls = first = [_of_calls(scheme, trajectory) for trajectory in trajectories]
    returns = [credit_at(0, *pair) for pair in zip(first, trajectories, strict=True)]
    return Credit(trajectories, calls, np.asarray(returns, np.float64))


def _of_calls(scheme: CreditScheme, trajectory: Trajectory) -> tuple[Advantage, ...]:
    """Return what the scheme gives each call. Raises ValueError for a wrong number of credits."""
    credits, counts = scheme(trajectory), [max(num_trained(t), 1) for t in trajectory.transitions]
    if not isinstance(credits, Sequence | np.ndarray) or len(credits) != len(counts):
        raise wrong_result(scheme, "credit", f"{credits!r:.80}", f"one per call, {len(counts)}")
    for credit, count in zip(credits, counts, strict=True):
        if len(credit) != count if isinstance(credit, tuple) else not isinstance(credit, Real):
            expected = f"a number, or a tuple of {count}, one per trained token"
            raise wrong_result(scheme, "credit", f"{credit!r:.80} for a call", expected)
    return tuple(credits)


def credit_at(turn: int, credits: Sequence[Advantage], trajectory: Trajectory) -> float:
    """Return the credit of a rollout's call at this turn, or of the call's first token.

    If the rollout ended earlier, take its last call. If it made no call, take its reward.
    """
    if not credits:
        return trajectory.reward
    credit = credits[min(turn, len(credits) - 1)]
    return credit[0] if isinstance(credit, tuple) else credit


def overlong_penalty(length: int, *, max_tokens: int, buffer: int) -> float:
    """Return the share of the penalty for a response of `length` tokens, 0 to 1.

    It is 0 up to `max_tokens - buffer` tokens, then rises linearly to 1 at `max_tokens` (DAPO's
    soft overlong punishment, arXiv 2503.14476).
    """
    if buffer == 0:
        return float(length >= max_tokens)
    return min(max((length - (max_tokens - buffer)) / buffer, 0.0), 1.0)


def punish_overlong(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> tuple[list[Trajectory], dict[str, float]]:
    """Lower the rewards of long calls and return (trajectories, metrics of the step).

    A call loses `algorithm.overlong_penalty` times its share. The rollout's own reward does not
    change. Without a penalty nothing changes and there are no metrics.
    """
    if algorithm.overlong_penalty == 0:
        return list(trajectories), {}
    shaped, costs = [], []
    for trajectory in trajectories:
        transitions = []
        for call in trajectory.transitions:
            cost = algorithm.overlong_penalty * _overlong_share(call, algorithm)
            transitions.append(replace(call, reward=call.reward - cost))
            costs.append(cost)
        shaped.append(replace(trajectory, transitions=tuple(transitions)))
    return shaped, {"train/overlong_penalty_mean": sum(costs) / max(len(costs), 1)}


def _overlong_share(call: Transition, algorithm: AlgorithmConfig) -> float:
    """Return the share of the penalty for a call, by its own token limit if none is set."""
    limit = algorithm.overlong_max_tokens or call.max_tokens
    if limit is None:  # of a record without limits
        return float(call.finish_reason == CUT_SHORT)
    buffer = limit // 5 if algorithm.overlong_buffer is None else algorithm.overlong_buffer
    return overlong_penalty(len(call.response_token_ids), max_tokens=limit, buffer=buffer)


def drop_overlong(
    trajectories: Sequence[Trajectory], values: Sequence[tuple[Any, ...]]
) -> tuple[list[Trajectory], list[tuple[Any, ...]], int]:
    """Return `drop_calls` of calls that a limit cut.

    From DAPO's overlong filtering (arXiv 2503.14476).
    """
    return drop_calls(trajectories, values, lambda call: call.finish_reason == CUT_SHORT)
