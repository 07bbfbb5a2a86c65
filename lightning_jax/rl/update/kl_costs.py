"""KL to the reference as a cost charged to a rollout's earlier calls, which the loss cannot see.

A microbatch holds the calls of many rollouts but rarely all calls of one. So the KL is measured
first, and the cost of a rollout's later calls is subtracted from the advantages of its earlier
calls. The loss subtracts the cost of later tokens of the same call.
"""

from collections import defaultdict
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.losses.ratios import kl_estimate
from lightning_jax.rl.sequence import TrainingSequence


def has_later_calls(sequences: Sequence[TrainingSequence]) -> bool:
    """Return whether any rollout has several calls, so that a call can cost an earlier one."""
    rollouts = [sequence.rollout for sequence in sequences if sequence.rollout is not None]
    return len(set(rollouts)) < len(rollouts)


def charge_later_calls(
    sequences: Sequence[TrainingSequence],
    batches: Sequence[Batch],
    logprobs: Sequence[Float[np.ndarray, "B R"]],
    ref_logprobs: Sequence[Float[np.ndarray, "B R"]],
    algorithm: AlgorithmConfig,
) -> list[Float[np.ndarray, "B R"]]:
    """Return each batch's advantages less `kl_coef` times the KL of the rollout's later calls.

    `batches` are the packed `sequences`, on the host. `logprobs` are the policy's before the step's
    first update. In `sequences` the calls of a rollout are in order. For policies that learn
    independently, a rollout is charged separately for each policy.
    """
    is_independent = algorithm.policy_updates == "independent"
    costs = np.zeros(len(sequences))
    for batch, policy, reference in zip(batches, logprobs, ref_logprobs, strict=True):
        cost = np.asarray(kl_estimate(jnp.asarray(reference - policy), algorithm.kl_estimator))
        np.add.at(costs, batch.target_calls[batch.target_mask], cost[batch.target_mask])
    later = np.zeros(len(sequences), np.float32)
    to_go: dict[tuple[int | None, int], float] = defaultdict(float)
    for index in reversed(range(len(sequences))):
        sequence = sequences[index]
        if sequence.rollout is not None:
            key = sequence.adapter if is_independent else None, sequence.rollout
            later[index] = to_go[key]
            to_go[key] += costs[index]
    # Padding has index -1 and is masked.
    return [
        np.where(
            batch.target_mask,
            batch.advantages - np.float32(algorithm.kl_coef) * later[batch.target_calls],
            np.float32(0.0),
        )
        for batch in batches
    ]
