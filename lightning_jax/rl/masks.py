"""Masks of a grammar in training: what they take from the policy that was sampled."""

import math
from collections.abc import Sequence

import numpy as np

from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.types import Metrics

MOST_LOST = 0.1  # mass that a mask or filter may take from a token's distribution unnoticed


def mask_metrics(sequences: Sequence[TrainingSequence]) -> Metrics:
    """Return the share of trained tokens that were sampled from another distribution.

    There, a mask or a filter took more than `MOST_LOST` of the mass of the distribution that the
    loss knows. Empty if no sequence has a trained token that was sampled.
    """
    sampled = [item for item in sequences if item.sampling_logprobs and any(item.loss_mask)]
    if not sampled:
        return {}
    kept = np.concatenate([_log_kept(item) for item in sampled])
    return {"train/adjusted_share": float((kept < math.log1p(-MOST_LOST)).mean())}


def _log_kept(sequence: TrainingSequence) -> np.ndarray:
    """Return the log of the mass that was left to each trained token's distribution."""
    gaps = np.subtract(sequence.behavior_logprobs, sequence.sampling_logprobs)
    return gaps[np.asarray(sequence.loss_mask, bool)]
