"""DPO (arXiv 2305.18290) over the rollouts of a step, which makes the better of two more likely.

A pair consists of two rollouts of one task, ranked by reward (online, as in arXiv 2404.19733). A
rollout's log-probability is the sum over all tokens that its calls sampled. The environment's
output is context (arXiv 2403.02502).

The loss of a pair depends on both rollouts, which may be spread over many rows and microbatches.
So each update measures log-probabilities first, and the gradient follows from the chain rule. The
derivative of the loss by a rollout's log-probability is one number, used as an advantage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from lightning_jax.rl.advantages import Pair, pair_signs
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.batches.batching import TOO_LARGE, make_sequences, why_dropped
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.types import Trajectory


def pair_sequences(
    trajectories: Sequence[Trajectory],
    pairs: Sequence[Pair],
    *,
    adapters: Mapping[str, int] | None = None,
) -> list[TrainingSequence]:
    """Build the sequences of all pairs, with the pair's index in `pair` and the sign as advantage.

    DPO sums log-probs, so every token's weight is one over the number of pairs. DPO does not use
    how an answer was sampled, so it learns at temperature 1.
    """
    signs = pair_signs(trajectories, pairs)
    return [
        replace(sequence, weight=1.0 / len(pairs), pair=number, temperature=1.0)
        for number, pair in enumerate(pairs)
        for index in pair
        for sequence in make_sequences([trajectories[index]], [signs[index]], adapters=adapters)
    ]


def drop_broken_pairs(
    sequences: Sequence[TrainingSequence], config: BatchConfig
) -> tuple[list[TrainingSequence], int]:
    """Drop pairs that do not fit whole into rows, and return (sequences, number of pairs dropped).

    Dropped pairs still count in the mean over pairs.
    """
    broken = {
        _key(sequence) for sequence in sequences if why_dropped(sequence, config) in TOO_LARGE
    }
    return [sequence for sequence in sequences if _key(sequence) not in broken], len(broken)


def dpo_losses(margins: Float[np.ndarray, " N"], *, beta: float) -> Float[np.ndarray, " N"]:
    """Return `-log sigmoid(beta * margin)` of each pair, in nats.

    A margin is the chosen rollout's (log-prob - reference log-prob), summed over tokens, minus that
    of the rejected rollout.
    """
    return np.logaddexp(0.0, -beta * margins)


def dpo_advantages(margins: Float[np.ndarray, " N"], *, beta: float) -> Float[np.ndarray, " N"]:
    """Return `beta * sigmoid(-beta * margin)`, the negative derivative of the loss by margin."""
    return beta * np.exp(-np.logaddexp(0.0, beta * margins))


def weigh_pairs(
    sequences: Sequence[TrainingSequence],
    batches: Sequence[Batch],
    logprobs: Sequence[Float[np.ndarray, "B R"]],
    ref_logprobs: Sequence[Float[np.ndarray, "B R"]],
    *,
    beta: float,
) -> tuple[list[Float[np.ndarray, "B R"]], dict[str, float]]:
    """Return (advantages of each batch's targets, metrics) from policy and reference log-probs.

    With these advantages the gradient of `-advantage * log-prob` equals that of the mean DPO loss.
    `batches` are the packed `sequences`, on the host. Each policy has its own pairs.
    """
    keys = {key: number for number, key in enumerate(dict.fromkeys(map(_key, sequences)))}
    pairs = np.asarray([keys[_key(sequence)] for sequence in sequences])
    signs = np.asarray([sequence.advantage for sequence in sequences])
    margins, shares = np.zeros((2, len(keys)))
    shares[pairs] = [sequence.weight for sequence in sequences]
    for batch, policy, reference in zip(batches, logprobs, ref_logprobs, strict=True):
        calls = batch.target_calls[batch.target_mask]
        gains = (policy.astype(np.float64) - reference)[batch.target_mask]
        np.add.at(margins, pairs[calls], signs[calls] * gains)
    of_calls = (signs * dpo_advantages(margins, beta=beta)[pairs]).astype(np.float32)
    # Padding has index -1 and is masked.
    return [
        np.where(batch.target_mask, of_calls[batch.target_calls], np.float32(0.0))
        for batch in batches
    ], {
        "train/loss": float((dpo_losses(margins, beta=beta) * shares).sum()),
        "train/preference_accuracy": float((margins > 0.0).mean()),
        "train/preference_margin": float(margins.mean()),
    }


def _key(sequence: TrainingSequence) -> tuple[int | None, int | None]:
    return sequence.adapter, sequence.pair
