"""Calls whose tokens come from weights that are too old to train on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.types import Trajectory


def drop_stale(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[tuple[Any, ...]],
    *,
    policy_version: int,
    max_staleness: int,
) -> tuple[list[Trajectory], list[tuple[Any, ...]], int]:
    """Drop stale calls and return (trajectories, advantages, number of calls dropped).

    `advantages` may hold any one value per call. A call's staleness is that of its oldest token, in
    trainer steps before `policy_version`. Compute advantages first, because a dropped call still
    counts in its rollout's return.
    """
    kept_trajectories, kept_advantages, num_dropped = [], [], 0
    for trajectory, values in zip(trajectories, advantages, strict=True):
        pairs = [
            (transition, value)
            for transition, value in zip(trajectory.transitions, values, strict=True)
            if policy_version - min(transition.policy_versions, default=policy_version)
            <= max_staleness
        ]
        num_dropped += len(values) - len(pairs)
        fresh = tuple(transition for transition, _ in pairs)
        kept_trajectories.append(replace(trajectory, transitions=fresh))
        kept_advantages.append(tuple(value for _, value in pairs))
    return kept_trajectories, kept_advantages, num_dropped
