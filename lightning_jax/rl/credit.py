"""Credit assignment: what each LLM call of a rollout is held responsible for."""

import itertools
import math

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


def _discounted_returns(trajectory: Trajectory, discount: float) -> tuple[float, ...]:
    if not trajectory.transitions:
        return ()
    rewards = [t.reward for t in trajectory.transitions]
    rewards[-1] += trajectory.reward
    # Backwards: G_t = r_t + discount * G_{t+1}.
    returns = itertools.accumulate(reversed(rewards), lambda later, r: r + discount * later)
    return tuple(returns)[::-1]
