"""Credit assignment: the share of a rollout's reward that each LLM call is responsible for."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.gae import CallValues, rollout_gae
from lightning_jax.types import Advantage, Trajectory


def assign_credit(
    trajectory: Trajectory,
    *,
    scheme: str,
    discount: float,
    gae_lambda: float = 1.0,
    values: Sequence[CallValues] | None = None,
) -> tuple[Advantage, ...]:
    """Return one credit per transition, in reward units, or `()` for a rollout without calls.

    "identical": every call gets the whole return, the rollout's reward plus all call rewards
    (arXiv 2508.03680). "per_step": call t gets `sum_k discount^(k-t) * r_k` over k >= t, with the
    rollout's reward earned at its last call. "turn_groups": the same, but `advantages` compares
    calls of the same turn. "learned": generalized advantage estimation over the calls (arXiv
    1506.02438) with `values` of the prompts, None for 0. "learned_token": the same over trained
    tokens, with one credit per token. A call without trained tokens has one credit.

    With `gae_lambda` 1 and values of 0, "learned" equals "per_step". It also equals "identical" if
    nothing is discounted and no call has its own reward. Raises ValueError for another scheme or a
    call reward that is not finite.
    """
    for transition in trajectory.transitions:
        if not math.isfinite(transition.reward):
            raise InvalidValue(
                f"call {transition.call_id!r} of rollout {trajectory.rollout_id!r} has reward "
                f"{transition.reward}; rewards must be finite",
                reason="not_finite",
                key=transition.call_id,
            )
    if scheme == "identical":
        whole = trajectory.reward + math.fsum(t.reward for t in trajectory.transitions)
        return (whole,) * len(trajectory.transitions)
    if scheme in ("per_step", "turn_groups"):
        return _discounted_returns(trajectory, discount)
    if scheme in ("learned", "learned_token"):
        per_token = scheme == "learned_token"
        calls = rollout_gae(
            trajectory, values, per_token=per_token, discount=discount, lam=gae_lambda
        )
        return tuple(advantages if per_token else advantages[0] for advantages, _ in calls)
    raise InvalidValue(
        f"credit scheme is {scheme!r}; expected identical, per_step, turn_groups, learned or "
        "learned_token.",
        reason="unknown",
        key="scheme",
    )


def rollout_return(trajectory: Trajectory, *, scheme: str, discount: float) -> float:
    """Return the rollout's return from its first call, or its reward alone if it made no call."""
    return credit_at(0, assign_credit(trajectory, scheme=scheme, discount=discount), trajectory)


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
    trajectories: Sequence[Trajectory], *, penalty: float, max_tokens: int, buffer: int
) -> tuple[list[Trajectory], dict[str, float]]:
    """Lower the rewards of long calls and return (trajectories, metrics of the step).

    A call loses `penalty` times its share. The rollout's own reward does not change.
    """
    shaped, costs = [], []
    for trajectory in trajectories:
        transitions = []
        for call in trajectory.transitions:
            size = len(call.response_token_ids)
            cost = penalty * overlong_penalty(size, max_tokens=max_tokens, buffer=buffer)
            transitions.append(dataclasses.replace(call, reward=call.reward - cost))
            costs.append(cost)
        shaped.append(dataclasses.replace(trajectory, transitions=tuple(transitions)))
    return shaped, {"train/overlong_penalty_mean": sum(costs) / max(len(costs), 1)}


def _discounted_returns(trajectory: Trajectory, discount: float) -> tuple[float, ...]:
    if not trajectory.transitions:
        return ()
    rewards = [t.reward for t in trajectory.transitions]
    rewards[-1] += trajectory.reward
    # Backwards: G_t = r_t + discount * G_{t+1}.
    returns = itertools.accumulate(reversed(rewards), lambda later, r: r + discount * later)
    return tuple(returns)[::-1]
