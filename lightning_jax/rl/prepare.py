"""Conversion of a step's trajectories to training sequences with advantages and weights.

Each of several policies learns from its own calls, or from those of all. With `policy_updates`
"independent", the calls of other policies are part of the environment, as in Agent Lightning (arXiv
2508.03680). A policy has its own groups, advantages and token weights, the same as if the others
were frozen. With "joint", a rollout is one sequence of calls by any policy. Credit runs through all
calls to the common return, and the step has one set of token weights.
"""

from collections.abc import Mapping, Sequence

from lightning_jax.errors import InvalidValue
from lightning_jax.models.policies import SINGLE, PolicyTable
from lightning_jax.rl.advantages import group_metrics, learners, make_pairs, step_advantages
from lightning_jax.rl.batches.batching import make_sequences
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.credit import assign_credit, drop_overlong, punish_overlong
from lightning_jax.rl.dpo import pair_sequences
from lightning_jax.rl.gae import CallValues, learnable_states
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.token_weights import drop_stale
from lightning_jax.types import Advantage, Trajectory


def prepare_step(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    *,
    policy_version: int,
    values: Sequence[Sequence[CallValues]] | None = None,
    adapters: Mapping[str, int] | None = None,
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """Return (one sequence per call that is not stale, metrics of the step).

    Apply the overlong penalty, assign credit, compute advantages, drop stale calls and, with
    `overlong_filter`, those that a limit cut, and weigh tokens. With the loss "dpo", a call's
    advantage is the sign of its rollout in its pair. Calls of unpaired rollouts are left out.
    `values` are the critic's values of each call's states. Learned credit needs them and raises
    ValueError without them. `adapters` maps several policies to their adapter indices.
    """
    trajectories, metrics = punish_overlong(trajectories, algorithm)
    credit = assign_credit(trajectories, algorithm, values)
    if algorithm.loss == "dpo":
        pairs, num_stale = make_pairs(credit, algorithm, policy_version=policy_version)
        return pair_sequences(trajectories, pairs, adapters=adapters), metrics | {
            **group_metrics(credit),
            "train/num_pairs": float(len(pairs)),
            "train/dropped_stale": float(num_stale),
        }
    advantages, of_groups = step_advantages(credit, algorithm)
    metrics |= of_groups | {"train/failures_gain_share": _failures_gain(trajectories, advantages)}
    limits = {"policy_version": policy_version, "max_staleness": algorithm.max_staleness}
    states = None
    if algorithm.has_critic:
        if values is None:
            raise InvalidValue.missing(
                "values",
                f"algorithm.credit={algorithm.credit} needs the critic's values; compute them "
                "first",
            )
        states, of_values = learnable_states(trajectories, values, algorithm)
        _, states, _ = drop_stale(trajectories, states, **limits)
        metrics |= of_values
    trajectories, advantages, num_stale = drop_stale(trajectories, advantages, **limits)
    if algorithm.overlong_filter:
        if states is not None:
            _, states, _ = drop_overlong(trajectories, states)
        trajectories, advantages, num_cut = drop_overlong(trajectories, advantages)
        metrics["train/dropped_cut_short"] = float(num_cut)
    sequences = make_sequences(
        trajectories,
        advantages,
        states=states,
        aggregation=algorithm.aggregation,
        token_divisor=algorithm.token_divisor,
        adapters=adapters,
    )
    return sequences, metrics | {"train/dropped_stale": float(num_stale)}


def _failures_gain(
    trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[Advantage]]
) -> float:
    """Return the share of failed trajectories whose advantages add up to more than 0."""
    sums = [
        sum(sum(call) if isinstance(call, tuple) else call for call in calls)
        for trajectory, calls in zip(trajectories, advantages, strict=True)
        if trajectory.is_failed
    ]
    return sum(value > 1e-9 for value in sums) / max(len(sums), 1)


def prepare_policies(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    policies: PolicyTable = SINGLE,
    *,
    policy_version: int | None = None,
    values: Sequence[Sequence[CallValues]] | None = None,
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """Return (training sequences, metrics) of one policy or of several `policies`.

    This is `prepare_step` for each policy's part: assign credit, compute advantages, drop stale
    calls and weigh tokens. `policy_version` is by default the newest that sampled a call.

    Metrics of one policy's part have names such as `train/num_groups/policy=writer`.
    """
    if policy_version is None:
        calls = (call for trajectory in trajectories for call in trajectory.transitions)
        policy_version = max((v for call in calls for v in call.policy_versions), default=0)
    sequences, metrics = [], {}
    for policy in learners(algorithm, policies):
        of_policy, row = prepare_step(
            policy.calls(trajectories),
            algorithm,
            policy_version=policy_version,
            values=None if values is None else policy.values(trajectories, values),
            adapters=policies.indices,
        )
        sequences += of_policy
        metrics |= {f"{name}{policy.suffix}": value for name, value in row.items()}
    return sequences, metrics
