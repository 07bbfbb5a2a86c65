"""Pairs of a step's rollouts for DPO (rl/dpo.py): two of one task, ranked by reward."""

from collections.abc import Sequence

import numpy as np

from lightning_jax.rl.advantages import are_equal, group_members
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.credit import Credit
from lightning_jax.rl.staleness import drop_stale
from lightning_jax.rl.token_weights import num_trained
from lightning_jax.types import Trajectory

Pair = tuple[int, int]  # indices of the chosen and of the rejected rollout


def make_pairs(
    credit: Credit, algorithm: AlgorithmConfig, *, policy_version: int
) -> tuple[list[Pair], int]:
    """Return (the pairs of a step, number of stale calls).

    In each group the best rollout is paired with the worst, the second best with the second worst,
    and so on while returns differ. A rollout is in at most one pair. A rollout with a stale call
    or without a trained token is not paired.
    """
    trajectories, returns = credit.trajectories, credit.returns
    fresh, _, num_stale = drop_stale(
        trajectories,
        [trajectory.transitions for trajectory in trajectories],
        policy_version=policy_version,
        max_staleness=algorithm.max_staleness,
    )
    usable = [
        len(left.transitions) == len(whole.transitions) and any(map(num_trained, left.transitions))
        for left, whole in zip(fresh, trajectories, strict=True)
    ]
    pairs = []
    for members in group_members([trajectory.group_id for trajectory in trajectories]).values():
        ranked = sorted(filter(usable.__getitem__, members), key=lambda index: -returns[index])
        for chosen, rejected in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if not are_equal(returns[[chosen, rejected]]):
                pairs.append((chosen, rejected))
    return pairs, num_stale


def pair_signs(
    trajectories: Sequence[Trajectory], pairs: Sequence[Pair]
) -> list[tuple[float, ...]]:
    """Return for each call 1 if its rollout is chosen, -1 if it is rejected, otherwise 0."""
    signs = np.zeros(len(trajectories))
    for chosen, rejected in pairs:
        signs[chosen], signs[rejected] = 1.0, -1.0
    return [
        (float(sign),) * len(trajectory.transitions)
        for sign, trajectory in zip(signs, trajectories, strict=True)
    ]
