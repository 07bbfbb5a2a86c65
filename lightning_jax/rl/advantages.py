"""Advantages: how much better a call did than the rollouts of its group usually do."""

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


def group_baseline(
    returns: Float[np.ndarray, " N"], *, normalize_by_std: bool
) -> tuple[float, float]:
    """(baseline, scale) of one group: the advantage of a credit is `(credit - baseline) * scale`.

    GRPO (arXiv 2402.03300): the baseline is the mean over the group's rollouts, the scale one over
    their standard deviation (of the population); without `normalize_by_std` the scale is 1 (arXiv
    2503.20783). One rollout, or equal returns, say nothing about which call was better: scale 0.
    """
    spread = returns.max() - returns.min()
    if spread <= EQUAL_RETURNS * max(1.0, float(np.abs(returns).max())):
        return float(returns.mean()), 0.0
    return float(returns.mean()), 1.0 / float(returns.std()) if normalize_by_std else 1.0


def step_advantages(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> tuple[list[tuple[float, ...]], dict[str, float]]:
    """(one tuple per trajectory with one advantage per transition, metrics of the step).

    The baseline is one number per group, made of whole rollouts, never of rows: a rollout with many
    calls counts once, and one without calls still counts. It is the same for every call of the
    group, so it favours none, also under per_step credit, where later calls have less to earn.
    """
    scheme, discount = algorithm.credit, algorithm.discount
    returns: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        earned = rollout_return(trajectory, scheme=scheme, discount=discount)
        returns[trajectory.group_id].append(earned)
    groups = {
        group: group_baseline(np.asarray(values), normalize_by_std=algorithm.normalize_by_std)
        for group, values in returns.items()
    }
    advantages = []
    for trajectory in trajectories:
        baseline, scale = groups[trajectory.group_id]
        credits = assign_credit(trajectory, scheme=scheme, discount=discount)
        advantages.append(tuple((credit - baseline) * scale for credit in credits))
    return advantages, _metrics(groups, advantages)


def _metrics(
    groups: dict[str, tuple[float, float]], advantages: list[tuple[float, ...]]
) -> dict[str, float]:
    equal = sum(scale == 0.0 for _, scale in groups.values())
    sizes = [abs(advantage) for calls in advantages for advantage in calls]
    return {
        "train/num_groups": float(len(groups)),
        "train/equal_groups_share": equal / max(len(groups), 1),
        "train/advantage_abs_mean": sum(sizes) / max(len(sizes), 1),
    }
