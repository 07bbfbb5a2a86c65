"""What a step trains on: its trajectories as sequences with advantages and weights."""

from collections.abc import Mapping, Sequence

from lightning_jax.config import AlgorithmConfig
from lightning_jax.rl.advantages import step_advantages
from lightning_jax.rl.batching import drop_stale, make_sequences
from lightning_jax.rl.credit import punish_overlong
from lightning_jax.rl.values import CallValues, learnable_states
from lightning_jax.types import TrainingSequence, Trajectory


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
    that are too old are dropped, and tokens are weighed. `values` are the critic's of the states of
    each call, which learned credit needs. Raises ValueError without them. `adapters` are the places
    of several policies' adapters.
    """
    metrics = {}
    if algorithm.overlong_penalty > 0:
        trajectories, metrics = punish_overlong(
            trajectories,
            penalty=algorithm.overlong_penalty,
            max_tokens=algorithm.overlong_max_tokens,
            buffer=algorithm.overlong_buffer,
        )
    advantages, of_groups = step_advantages(trajectories, algorithm, values)
    metrics |= of_groups
    limits = {"policy_version": policy_version, "max_staleness": algorithm.max_staleness}
    states = None
    if algorithm.has_critic:
        if values is None:
            raise ValueError(f"credit {algorithm.credit} got no values; measure them first.")
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
