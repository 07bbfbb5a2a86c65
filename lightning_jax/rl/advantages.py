"""Advantages: how much better a call did than rollouts usually do."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from lightning_jax.config import AlgorithmConfig
from lightning_jax.rl.credit import assign_credit, rollout_return
from lightning_jax.types import Trajectory

# Returns of a group that differ by less than this, relative to the largest, count as equal: they
# differ by rounding, and dividing by their standard deviation would blow the rounding up to
# advantages of 1.
EQUAL_RETURNS = 1e-6


def group_baselines(returns: Float[np.ndarray, " N"], kind: str) -> Float[np.ndarray, " N"]:
    """What is subtracted from the credits of each rollout of one group, in reward units.

    "group_mean": the mean return of the group (GRPO, arXiv 2402.03300). "leave_one_out": the mean
    of its other rollouts (RLOO, arXiv 2402.14740); a rollout alone has itself.
    """
    if kind == "leave_one_out" and len(returns) > 1:
        return (returns.sum() - returns) / (len(returns) - 1)
    return np.full_like(returns, returns.mean())


def baselines_and_scales(
    returns: Float[np.ndarray, " N"], group_ids: Sequence[str], *, baseline: str, normalize: str
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """(baseline, scale) of each rollout; a credit's advantage is `(credit - baseline) * scale`.

    The baseline is that of the group, the mean over the step ("batch_mean", REINFORCE++, arXiv
    2501.03262) or 0 ("none"). The scale is one over the standard deviation of the group's returns
    ("group_std"), one over that of all returns less their baselines ("batch_std"), or 1 ("none",
    as in Dr. GRPO, arXiv 2503.20783); deviations are those of the population. Against a group's
    baseline one rollout, or equal returns, say nothing about which call was better: scale 0. So it
    is wherever the deviation to divide by is 0.
    """
    baselines, scales = np.zeros_like(returns), np.ones_like(returns)
    for members in _groups(group_ids).values():
        group = returns[members]
        if baseline in ("group_mean", "leave_one_out"):
            baselines[members] = group_baselines(group, baseline)
            scales[members] = 0.0 if are_equal(group) else 1.0
        if normalize == "group_std":
            scales[members] = 0.0 if are_equal(group) else 1.0 / group.std()
    if baseline == "batch_mean" and len(returns):
        baselines[:] = returns.mean()
    if normalize == "batch_std" and len(returns):
        centred = returns - baselines
        scales *= 0.0 if are_equal(centred) else 1.0 / centred.std()
    return baselines, scales


def are_equal(returns: Float[np.ndarray, " N"]) -> bool:
    """Whether returns are the same up to rounding; one alone is."""
    spread = returns.max() - returns.min()
    return bool(spread <= EQUAL_RETURNS * max(1.0, float(np.abs(returns).max())))


def equal_groups(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> set[str]:
    """The ids of the groups whose returns are all equal."""
    returns = _returns(trajectories, algorithm)
    groups = _groups([trajectory.group_id for trajectory in trajectories])
    return {group for group, members in groups.items() if are_equal(returns[members])}


def step_advantages(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> tuple[list[tuple[float, ...]], dict[str, float]]:
    """(one tuple per trajectory with one advantage per transition, metrics of the step).

    The baseline is one number per rollout, made of whole rollouts, never of rows: a rollout with
    many calls counts once, and one without calls still counts. It is the same for every call of the
    rollout, so it favours none, also under per_step credit, where later calls have less to earn.
    """
    baselines, scales = baselines_and_scales(
        _returns(trajectories, algorithm),
        [trajectory.group_id for trajectory in trajectories],
        baseline=algorithm.baseline,
        normalize=algorithm.normalize,
    )
    advantages = []
    for trajectory, baseline, scale in zip(
        trajectories, baselines.tolist(), scales.tolist(), strict=True
    ):
        credits = assign_credit(trajectory, scheme=algorithm.credit, discount=algorithm.discount)
        advantages.append(tuple((credit - baseline) * scale for credit in credits))
    num_groups = len({trajectory.group_id for trajectory in trajectories})
    num_equal = len(equal_groups(trajectories, algorithm))
    sizes = [abs(advantage) for calls in advantages for advantage in calls]
    return advantages, {
        "train/num_groups": float(num_groups),
        "train/equal_groups_share": num_equal / max(num_groups, 1),
        "train/advantage_abs_mean": sum(sizes) / max(len(sizes), 1),
    }


def _returns(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> Float[np.ndarray, " N"]:
    """What each rollout earned, float64."""
    scheme, discount = algorithm.credit, algorithm.discount
    earned = [rollout_return(each, scheme=scheme, discount=discount) for each in trajectories]
    return np.asarray(earned, np.float64)


def _groups(group_ids: Sequence[str]) -> dict[str, list[int]]:
    """The places of each group's rollouts."""
    members: dict[str, list[int]] = defaultdict(list)
    for place, group_id in enumerate(group_ids):
        members[group_id].append(place)
    return members
