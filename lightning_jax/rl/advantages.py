"""Advantages, which compare a call's credit with a baseline."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.credit import assign_credit, credit_at, rollout_return
from lightning_jax.rl.gae import CallValues
from lightning_jax.types import Advantage, Trajectory

# Relative difference up to which a group's returns, or a credit and its baseline, count as equal.
# Such a difference is rounding error. Dividing by the standard deviation of such returns would
# inflate the error to advantages of 1.
EQUAL_RETURNS = 1e-6


def group_baselines(returns: Float[np.ndarray, " N"], kind: str) -> Float[np.ndarray, " N"]:
    """Return the baseline of each rollout of one group, in reward units.

    "group_mean": the mean return of the group (GRPO, arXiv 2402.03300). "leave_one_out": the mean
    of its other rollouts (RLOO, arXiv 2402.14740), or its own return in a group of one.
    """
    if kind == "leave_one_out" and len(returns) > 1:
        return (returns.sum() - returns) / (len(returns) - 1)
    return np.full_like(returns, returns.mean())


def baselines_and_scales(
    returns: Float[np.ndarray, " N"], group_ids: Sequence[str], *, baseline: str, normalize: str
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Return (baseline, scale) of each rollout; the advantage is `(credit - baseline) * scale`.

    The baseline is from `group_baselines`, the mean over the step ("batch_mean", REINFORCE++, arXiv
    2501.03262) or 0 ("none"). With "group_std" the scale is one over the population standard
    deviation of the group's returns. With "batch_std" the deviation is that of all returns minus
    their baselines. With "none" the scale is 1 (as in Dr. GRPO, arXiv 2503.20783).

    The scale is 0 for a single rollout with a group baseline, which cannot show which call was
    better. It is also 0 if the standard deviation is 0. Equal returns alone do not make it 0. With
    per-step and learned credit their calls can differ, and dropping groups whose returns are equal
    by chance would bias the gradient.
    """
    baselines, scales = np.zeros_like(returns), np.ones_like(returns)
    for members in group_members(group_ids).values():
        group = returns[members]
        if baseline in ("group_mean", "leave_one_out"):
            baselines[members] = group_baselines(group, baseline)
            scales[members] = 0.0 if len(group) == 1 else 1.0
        if normalize == "group_std":
            scales[members] = 0.0 if are_equal(group) else 1.0 / group.std()
    if baseline == "batch_mean" and len(returns):
        baselines[:] = returns.mean()
    if normalize == "batch_std" and len(returns):
        centred = returns - baselines
        scales *= 0.0 if are_equal(centred) else 1.0 / centred.std()
    return baselines, scales


def difference(credit: float, baseline: float) -> float:
    """Return credit minus baseline, or 0 if the difference is only rounding error."""
    gap = credit - baseline
    return 0.0 if abs(gap) <= EQUAL_RETURNS * max(1.0, abs(credit)) else gap


def are_equal(returns: Float[np.ndarray, " N"]) -> bool:
    """Return whether all returns are equal up to rounding error."""
    value_range = returns.max() - returns.min()
    return bool(value_range <= EQUAL_RETURNS * max(1.0, float(np.abs(returns).max())))


def equal_groups(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> set[str]:
    """Return the ids of the groups whose returns are all equal."""
    returns = returns_of(trajectories, algorithm)
    groups = group_members([trajectory.group_id for trajectory in trajectories])
    return {group for group, members in groups.items() if are_equal(returns[members])}


def group_metrics(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Return a step's number of groups and the shares of two kinds of group.

    One has equal returns. The other has equal rollout rewards but returns that differ through call
    rewards alone.
    """
    rewards = np.asarray([trajectory.reward for trajectory in trajectories], np.float64)
    groups = group_members([trajectory.group_id for trajectory in trajectories])
    equal = equal_groups(trajectories, algorithm)
    by_calls = [
        group
        for group, members in groups.items()
        if group not in equal and are_equal(rewards[members])
    ]
    return {
        "train/num_groups": float(len(groups)),
        "train/equal_groups_share": len(equal) / max(len(groups), 1),
        "train/only_call_rewards_share": len(by_calls) / max(len(groups), 1),
    }


def step_advantages(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    values: Sequence[Sequence[CallValues]] | None = None,
) -> tuple[list[tuple[Advantage, ...]], dict[str, float]]:
    """Return (one tuple per trajectory with one advantage per transition, metrics of the step).

    A call's baseline uses one number of each rollout, its credit at the same turn. So later calls,
    which have less left to earn, are not blamed for that. A rollout that ended earlier counts with
    its last credit, and one without calls with its reward. The baseline then does not depend on
    which rollouts got that far, and the gradient stays unbiased.

    With identical credit, the baseline is the same for all calls of a rollout. With learned credit,
    it corrects the critic's average error. Standard deviations are those of returns. `values` are
    the critic's, None for 0. For turn_groups see `turn_advantages`.
    """
    knobs = {
        "scheme": algorithm.credit,
        "discount": algorithm.discount,
        "gae_lambda": algorithm.gae_lambda,
    }
    known = [None] * len(trajectories) if values is None else values
    credits = [
        assign_credit(trajectory, values=of_calls, **knobs)
        for trajectory, of_calls in zip(trajectories, known, strict=True)
    ]
    if algorithm.credit == "turn_groups":
        advantages = turn_advantages(trajectories, credits, algorithm)
    else:
        advantages = _rollout_advantages(trajectories, credits, algorithm)
    sizes = [
        abs(advantage) for calls in advantages for call in calls for advantage in _of_tokens(call)
    ]
    return advantages, group_metrics(trajectories, algorithm) | {
        "train/advantage_abs_mean": sum(sizes) / max(len(sizes), 1),
    }


def turn_advantages(
    trajectories: Sequence[Trajectory],
    credits: Sequence[tuple[Advantage, ...]],
    algorithm: AlgorithmConfig,
) -> list[tuple[Advantage, ...]]:
    """Compare each call with its group's calls at the same turn, as if they were a separate group.

    This is biased if agents choose when to stop, even with `leave_one_out` and without `normalize`.
    The policy then decides how many rollouts reach a turn, and a call's own return is part of its
    baseline. A call alone at its turn is its own baseline and has advantage 0. So the fewer
    rollouts reach a turn, the less of its gradient is left. A baseline that is one number for all
    calls of a rollout shrinks them all equally.
    """
    flat: list[Any] = [credit for calls in credits for credit in calls]
    turns = [
        f"{trajectory.group_id}/{turn}"
        for trajectory, calls in zip(trajectories, credits, strict=True)
        for turn in range(len(calls))
    ]
    baselines, scales = baselines_and_scales(
        np.asarray(flat, np.float64),
        turns,
        baseline=algorithm.baseline,
        normalize=algorithm.normalize,
    )
    rest = iter(
        [
            difference(*pair) * scale
            for *pair, scale in zip(flat, baselines.tolist(), scales.tolist(), strict=True)
        ]
    )
    return [tuple(itertools.islice(rest, len(calls))) for calls in credits]


def _rollout_advantages(
    trajectories: Sequence[Trajectory],
    credits: Sequence[tuple[Advantage, ...]],
    algorithm: AlgorithmConfig,
) -> list[tuple[Advantage, ...]]:
    group_ids = [trajectory.group_id for trajectory in trajectories]
    knobs = {"baseline": algorithm.baseline, "normalize": algorithm.normalize}
    pairs = list(zip(credits, trajectories, strict=True))
    baselines = []
    for turn in range(max(map(len, credits), default=0)):
        at_turn = np.asarray([credit_at(turn, *pair) for pair in pairs], np.float64)
        baselines.append(baselines_and_scales(at_turn, group_ids, **knobs)[0].tolist())
    # Scales come from returns. With lambda below 1, credits hardly differ in a long rollout.
    _, scales = baselines_and_scales(returns_of(trajectories, algorithm), group_ids, **knobs)

    def advantage(credit: Advantage, baseline: float, scale: float) -> Advantage:
        if isinstance(credit, tuple):
            return tuple(difference(value, baseline) * scale for value in credit)
        return difference(credit, baseline) * scale

    return [
        tuple(advantage(credit, baselines[turn][i], scale) for turn, credit in enumerate(calls))
        for i, (calls, scale) in enumerate(zip(credits, scales.tolist(), strict=True))
    ]


def _of_tokens(advantage: Advantage) -> tuple[float, ...]:
    return advantage if isinstance(advantage, tuple) else (advantage,)


def returns_of(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> Float[np.ndarray, " N"]:
    """Return each rollout's return in float64, without any critic."""
    scheme, discount = algorithm.credit, algorithm.discount
    earned = [
        rollout_return(trajectory, scheme=scheme, discount=discount) for trajectory in trajectories
    ]
    return np.asarray(earned, np.float64)


def group_members(group_ids: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of each group's rollouts."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, group_id in enumerate(group_ids):
        members[group_id].append(index)
    return members
