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
from lightning_jax.rl.multi_policy.scope import credit_scopes
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.types import Trajectory


def prepare_policies(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    policies: Mapping[str, PolicyConfig],
    *,
    policy_version: int,
    values: Sequence[Sequence[CallValues]] | None = None,
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """Prepare a step like `prepare_step`, for several policies or, if `policies` is empty, for one.

    Adapter indices follow the order of `policies`. Metrics of one policy's part have names such as
    `train/num_groups/policy=writer`.
    """
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
