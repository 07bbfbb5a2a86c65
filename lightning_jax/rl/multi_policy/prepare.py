"""Selection of the calls that each of several policies learns from: its own, or those of all.

With `policy_updates` "independent", the calls of other policies are part of the environment, as in
Agent Lightning (arXiv 2508.03680). A policy has its own groups, advantages and token weights, the
same as if the others were frozen. With "joint", a rollout is one sequence of calls by any policy.
Credit runs through all calls to the common return, and the step has one set of token weights.
"""

from collections.abc import Mapping, Sequence

from lightning_jax.models.config import PolicyConfig, policy_indices
from lightning_jax.rl.batch import TrainingSequence
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.gae import CallValues
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.types import Trajectory, keep_calls


def keep_policy_calls(trajectories: Sequence[Trajectory], policy: str) -> list[Trajectory]:
    """Return all trajectories, reduced to the calls of one policy."""
    return [
        keep_calls(trajectory, lambda call: call.answered_by == policy)
        for trajectory in trajectories
    ]


def learning_parts(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    policies: Mapping[str, PolicyConfig],
) -> dict[str, list[Trajectory]]:
    """Return the trajectories for each separate learner, by policy.

    The name "" means all policies together, or the only one.
    """
    if not policies or algorithm.policy_updates == "joint":
        return {"": list(trajectories)}
    return {
        name: keep_policy_calls(trajectories, name)
        for name, config in policies.items()
        if config.trains
    }


def prepare_policies(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    policies: Mapping[str, PolicyConfig] | None = None,
    *,
    policy_version: int | None = None,
    values: Sequence[Sequence[CallValues]] | None = None,
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """Return (training sequences, metrics) of one policy or of several `policies`.

    This is `prepare_step` for each policy's part: assign credit, compute advantages, drop stale
    calls and weigh tokens. `policy_version` is by default the newest that sampled a call.
    Adapter indices follow the order of `policies`. Metrics of one policy's part have names such as
    `train/num_groups/policy=writer`.
    """
    policies = policies or {}
    if policy_version is None:
        calls = (call for trajectory in trajectories for call in trajectory.transitions)
        policy_version = max((v for call in calls for v in call.policy_versions), default=0)
    adapters = policy_indices(policies)
    sequences, metrics = [], {}
    for policy, part in learning_parts(trajectories, algorithm, policies).items():
        known = values
        if policy and values is not None:
            known = _keep_policy_values(trajectories, values, policy)
        made, of_part = prepare_step(
            part, algorithm, policy_version=policy_version, values=known, adapters=adapters
        )
        sequences += made
        suffix = f"/policy={policy}" if policy else ""
        metrics |= {f"{name}{suffix}": value for name, value in of_part.items()}
    return sequences, metrics


def _keep_policy_values(
    trajectories: Sequence[Trajectory], values: Sequence[Sequence[CallValues]], policy: str
) -> list[tuple[CallValues, ...]]:
    """Return the values of the calls that `keep_policy_calls` keeps."""
    return [
        tuple(
            value
            for call, value in zip(trajectory.transitions, of_calls, strict=True)
            if call.answered_by == policy
        )
        for trajectory, of_calls in zip(trajectories, values, strict=True)
    ]
