"""What a step trains on: its trajectories as sequences with advantages and weights."""

from collections.abc import Mapping, Sequence

from lightning_jax.config import AlgorithmConfig
from lightning_jax.rl.advantages import group_metrics, step_advantages
from lightning_jax.rl.batching import drop_stale, make_sequences
from lightning_jax.rl.credit import punish_overlong
from lightning_jax.rl.preferences import make_pairs, pair_sequences
from lightning_jax.rl.values import CallValues, learnable_states
from lightning_jax.types import InvalidValue, TrainingSequence, Trajectory


def prepare_step(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    *,
    policy_version: int,
    values: Sequence[Sequence[CallValues]] | None = None,
    adapters: Mapping[str, int] | None = None,
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """(one sequence per call that is fresh enough, metrics of the step).

    Long responses cost what they cost, calls get their credit, credits become advantages, calls
    that are too old are dropped, and tokens are weighed. With the loss "dpo" calls have the sign of
    their rollout in its pair for an advantage, and those of rollouts in no pair are left out.
    `values` are the critic's of the states of each call, which learned credit needs. Raises
    ValueError without them. `adapters` are the places of several policies' adapters.
    """
    metrics = {}
    if algorithm.overlong_penalty > 0:
        trajectories, metrics = punish_overlong(
            trajectories,
            penalty=algorithm.overlong_penalty,
            max_tokens=algorithm.overlong_max_tokens,
            buffer=algorithm.overlong_buffer,
        )
    if algorithm.loss == "dpo":
        sequences, of_pairs = _prepare_pairs(trajectories, algorithm, policy_version, adapters)
        return sequences, metrics | of_pairs
    advantages, of_groups = step_advantages(trajectories, algorithm, values)
    metrics |= of_groups
    limits = {"policy_version": policy_version, "max_staleness": algorithm.max_staleness}
    states = None
    if algorithm.has_critic:
        if values is None:
            raise InvalidValue(
                f"credit {algorithm.credit} got no values; measure them first.",
                reason="missing",
                key="values",
            )
        states, of_values = learnable_states(trajectories, values, algorithm)
        _, states, _ = drop_stale(trajectories, states, **limits)
        metrics |= of_values
    trajectories, advantages, num_stale = drop_stale(trajectories, advantages, **limits)
    sequences = make_sequences(
        trajectories,
        advantages,
        states=states,
        aggregation=algorithm.aggregation,
        token_divisor=algorithm.token_divisor,
        adapters=adapters,
    )
    return sequences, metrics | {"train/dropped_stale": float(num_stale)}


def _prepare_pairs(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    policy_version: int,
    adapters: Mapping[str, int] | None,
) -> tuple[list[TrainingSequence], dict[str, float]]:
    pairs, num_stale = make_pairs(trajectories, algorithm, policy_version=policy_version)
    sequences = pair_sequences(trajectories, pairs, adapters=adapters)
    return sequences, group_metrics(trajectories, algorithm) | {
        "train/num_pairs": float(len(pairs)),
        "train/dropped_stale": float(num_stale),
    }
