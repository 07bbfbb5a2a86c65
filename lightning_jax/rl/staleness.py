"""Calls whose tokens come from weights that are too old to train on."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.types import Trajectory, Transition


def is_stale(call: Transition, *, policy_version: int, max_staleness: int) -> bool:
    """Return True if the call's oldest token is more than `max_staleness` trainer steps old."""
    return policy_version - min(call.policy_versions, default=policy_version) > max_staleness


def newest_version(calls: Iterable[Transition]) -> int | None:
    """Return the weights version of the call that is stale last, or None without a trained call.

    Once this version is too old, nothing can be learned from the calls.
    """
    versions = [min(call.policy_versions) for call in calls if call.trains and call.policy_versions]
    return max(versions, default=None)


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
            (call, value)
            for call, value in zip(trajectory.transitions, values, strict=True)
            if not is_stale(call, policy_version=policy_version, max_staleness=max_staleness)
        ]
        num_dropped += len(values) - len(pairs)
        fresh = tuple(call for call, _ in pairs)
        kept_trajectories.append(replace(trajectory, transitions=fresh))
        kept_advantages.append(tuple(value for _, value in pairs))
    return kept_trajectories, kept_advantages, num_dropped
