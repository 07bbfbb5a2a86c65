"""DPO (arXiv 2305.18290): learning from pairs of responses of which one is preferred.

The loss of a pair is a function of both its responses, which may lie in different rows and
microbatches. So each step measures first, and the gradient follows by the chain rule: the loss's
derivative by a response's log-probability is one number, and takes the place of an advantage.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from lightning_jax.config import BatchConfig
from lightning_jax.models.transformer import Params
from lightning_jax.rl.batching import make_batches
from lightning_jax.rl.bundles import measure
from lightning_jax.rl.objectives import Objective, policy_objective
from lightning_jax.rl.train_state import TrainState
from lightning_jax.rl.train_step import TrainFunctions, update
from lightning_jax.types import Batch, TrainingSequence


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one prompt, token ids throughout."""

    prompt_token_ids: tuple[int, ...]
    chosen_token_ids: tuple[int, ...]
    rejected_token_ids: tuple[int, ...]


def dpo_objective() -> Objective:
    """The objective of the train functions that `dpo_update` takes: minus advantage * log-prob."""
    return policy_objective(loss="reinforce", proximal="old")


def pair_sequences(pairs: Sequence[PreferencePair]) -> list[TrainingSequence]:
    """The responses of pair k as sequences 2k (chosen) and 2k + 1 (rejected), of weight 1 / pairs.

    DPO adds up a response's log-probs, so every token has that weight.
    """
    return [
        TrainingSequence(
            prompt_token_ids=pair.prompt_token_ids,
            response_token_ids=response,
            behavior_logprobs=(0.0,) * len(response),
            advantage=0.0,
            weight=1.0 / len(pairs),
        )
        for pair in pairs
        for response in (pair.chosen_token_ids, pair.rejected_token_ids)
    ]


def dpo_losses(margins: Float[np.ndarray, " N"], *, beta: float) -> Float[np.ndarray, " N"]:
    """`-log sigmoid(beta * margin)` of each pair, in nats.

    A margin is how much more the policy prefers the chosen response than the reference does: the
    difference of the two responses' (log-prob - reference log-prob), sums over their tokens.
    """
    return np.logaddexp(0.0, -beta * margins)


def dpo_advantages(margins: Float[np.ndarray, " N"], *, beta: float) -> Float[np.ndarray, " N"]:
    """`beta * sigmoid(-beta * margin)`: minus the derivative of a pair's loss by its margin."""
    return beta * np.exp(-np.logaddexp(0.0, beta * margins))


def dpo_update(
    functions: TrainFunctions,
    state: TrainState,
    pairs: Sequence[PreferencePair],
    config: BatchConfig,
    ref_params: Params,
    *,
    beta: float,
) -> tuple[TrainState, dict[str, float]]:
    """One optimizer update on the mean DPO loss of the pairs, and its metrics. Takes over `state`.

    Pairs of which a response does not fit a row, or is empty, are left out and counted as
    `train/dropped_pairs`; they still count in the mean. Raises ValueError when no pair is left.
    """
    sequences = pair_sequences(pairs)
    batches, stats = make_batches(sequences, config)
    packed = np.zeros(len(sequences), bool)
    for batch in batches:
        packed[batch.target_calls[batch.target_mask]] = True
    complete = packed[0::2] & packed[1::2]
    if not complete.any():
        raise ValueError(
            f"0 of {len(pairs)} pairs can be trained on; expected responses that are not empty and "
            f"fit rows of batch.row_len={config.row_len} tokens."
        )
    policy = sequence_logprobs(functions, state.policy, batches, len(sequences))
    reference = sequence_logprobs(functions, ref_params, batches, len(sequences))
    margins = (policy - reference)[0::2] - (policy - reference)[1::2]
    advantages = dpo_advantages(margins, beta=beta)
    placed = _with_advantages(batches, advantages, complete)
    state, metrics = update(functions, state, placed)
    metrics.pop("train/mismatch_kl")  # nothing was sampled
    return state, stats | metrics | {
        "train/loss": float(dpo_losses(margins, beta=beta)[complete].sum() / len(pairs)),
        "train/preference_accuracy": float((margins[complete] > 0.0).mean()),
        "train/preference_margin": float(margins[complete].mean()),
        "train/dropped_pairs": float((~complete).sum()),
    }


def sequence_logprobs(
    functions: TrainFunctions, params: Params, batches: Sequence[Batch], number: int
) -> Float[np.ndarray, " N"]:
    """The log-probability in nats of each of the `number` packed sequences, 0 for one left out."""
    sums = np.zeros(number)
    measured = measure(functions.logprobs_fn, batches, params)
    for batch, logprobs in zip(batches, measured, strict=True):
        mask = np.asarray(batch.target_mask)
        known = np.asarray(logprobs, np.float64)[mask]
        np.add.at(sums, np.asarray(batch.target_calls)[mask], known)
    return sums


def _with_advantages(
    batches: Sequence[Batch], advantages: Float[np.ndarray, " N"], complete: Bool[np.ndarray, " N"]
) -> list[Batch]:
    """Chosen responses are pushed up and rejected ones down, those of incomplete pairs neither."""
    per_pair = np.where(complete, advantages, 0.0)
    per_sequence = np.stack([per_pair, -per_pair], axis=1).ravel().astype(np.float32)
    return [
        dataclasses.replace(
            batch,
            # Padding has index -1 and is masked.
            advantages=np.where(batch.target_mask, per_sequence[batch.target_calls], 0.0).astype(
                np.float32
            ),
        )
        for batch in batches
    ]
