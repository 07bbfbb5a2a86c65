"""Credit assignment: what each LLM call of a rollout is held responsible for."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from lightning_jax.types import Trajectory


def assign_credit(trajectory: Trajectory, *, scheme: str, discount: float) -> tuple[float, ...]:
    """One credit per transition, in reward units; `()` for a rollout without calls.

    "identical": every call gets the whole return, the rollout's reward plus all call rewards
    (arXiv 2508.03680). "per_step": call t gets `sum_k discount^(k-t) * r_k` over k >= t, where the
    reward of the rollout is earned at its last call. Raises ValueError for another scheme or a call
    reward that is not finite.
    """
    for transition in trajectory.transitions:
        if not math.isfinite(transition.reward):
            raise ValueError(
                f"call {transition.call_id!r} of rollout {trajectory.rollout_id!r} has reward "
                f"{transition.reward}; expected a finite number."
            )
    if scheme == "identical":
        whole = trajectory.reward + math.fsum(t.reward for t in trajectory.transitions)
        return (whole,) * len(trajectory.transitions)
    if scheme == "per_step":
        return _discounted_returns(trajectory, discount)
    raise ValueError(f"credit scheme is {scheme!r}; expected identical or per_step.")


def rollout_return(trajectory: Trajectory, *, scheme: str, discount: float) -> float:
    """What the rollout earned, seen from its first call; its reward alone if it made no call."""
    credits = assign_credit(trajectory, scheme=scheme, discount=discount)
    return credits[0] if credits else trajectory.reward


def overlong_penalty(length: int, *, max_tokens: int, buffer: int) -> float:
    """The share of the penalty that a response of `length` tokens costs, 0 to 1.

    0 up to `max_tokens - buffer` tokens, then a straight line up to 1 at `max_tokens` (DAPO's soft
    overlong punishment, arXiv 2503.14476).
    """
    if buffer == 0:
        return float(length >= max_tokens)
    return min(max((length - (max_tokens - buffer)) / buffer, 0.0), 1.0)


def punish_overlong(
    trajectories: Sequence[Trajectory], *, penalty: float, max_tokens: int, buffer: int
) -> tuple[list[Trajectory], dict[str, float]]:
    """(the trajectories with the rewards of long calls lowered, metrics of the step).

    A call loses `penalty` times its share; a rollout's own reward stays as it is.
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
