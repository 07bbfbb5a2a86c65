"""Selection of the calls that each of several policies learns from: its own, or those of all.

With `policy_updates` "independent", the calls of other policies are part of the environment, as in
Agent Lightning (arXiv 2508.03680). A policy has its own groups, advantages and token weights, the
same as if the others were frozen. With "joint", a rollout is one sequence of calls by any policy.
Credit runs through all calls to the common return, and the step has one set of token weights.
"""

from collections.abc import Mapping, Sequence

from lightning_jax.models.config import PolicyConfig, policy_indices
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.gae import CallValues
from lightning_jax.rl.multi_policy.scope import credit_scopes
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.types import Trajectory


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
    sequences, metrics = [], {}
    for scope in credit_scopes(algorithm, policies):
        made, of_scope = prepare_step(
            scope.calls(trajectories),
            algorithm,
            policy_version=policy_version,
            values=None if values is None else scope.values(trajectories, values),
            adapters=policy_indices(policies),
        )
        sequences += made
        metrics |= {f"{name}{scope.suffix}": value for name, value in of_scope.items()}
    return sequences, metrics
