"""Distillation on the policy's own samples: sequences that a teacher scores, and their scores.

A teacher is any model with the policy's vocabulary, or the policy itself with a hint. It reads what
the policy read, or that and a hint (`hints.py`), and says how likely it finds each token that the
policy sampled. The loss turns the scores into advantages (`losses/distill.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lightning_jax.models.sharding import batch_sharding, make_gather, put_on_mesh, to_host
from lightning_jax.models.transformer import DecoderConfig, Params
from lightning_jax.rl.batching import make_batches
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.forward_pass import ForwardPass
from lightning_jax.rl.microbatches import by_sequence, map_bundle, measure
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.types import Advantage, Metrics

Scores = list[tuple[float, ...] | None]  # log-probabilities of each response; None: not scored


def mix(
    sequences: Sequence[TrainingSequence], *, coef: float, reward_coef: float
) -> list[TrainingSequence]:
    """Return the sequences with `coef` for the teacher, and advantages times `reward_coef`."""
    return [
        replace(item, teacher_coef=coef, advantage=_times(item.advantage, reward_coef))
        for item in sequences
    ]


def _times(advantage: Advantage, factor: float) -> Advantage:
    if isinstance(advantage, tuple):
        return tuple(factor * value for value in advantage)
    return factor * advantage


def waits_for_teacher(sequence: TrainingSequence) -> bool:
    """Return True if a teacher should score the sequence and has not."""
    return sequence.teacher_coef > 0 and not sequence.teacher_logprobs


def with_scores(sequences: Sequence[TrainingSequence], scores: Scores) -> list[TrainingSequence]:
    """Return the sequences with the scores of those that wait for a teacher, in order.

    A sequence without scores learns without a teacher.
    """
    rest = iter(scores)
    return [_scored(item, next(rest)) if waits_for_teacher(item) else item for item in sequences]


def _scored(sequence: TrainingSequence, scores: tuple[float, ...] | None) -> TrainingSequence:
    if scores is None:
        return replace(sequence, teacher_coef=0.0)
    return replace(sequence, teacher_logprobs=scores)


def teacher_metrics(sequences: Sequence[TrainingSequence]) -> Metrics:
    """Return the reverse KL to the teacher at the tokens it scored, and their share.

    The KL is the mean of the sampler's log-probability less the teacher's, in nats. It is left out
    if no token was scored.
    """
    gaps = [
        behavior - teacher
        for item in sequences
        if item.teacher_logprobs
        for behavior, teacher, trained in zip(
            item.behavior_logprobs, item.teacher_logprobs, item.loss_mask, strict=True
        )
        if trained
    ]
    total = sum(item.loss_mask.count(True) for item in sequences)
    metrics = {"train/teacher_share": len(gaps) / max(total, 1)}
    return metrics | ({"train/kl_to_teacher": sum(gaps) / len(gaps)} if gaps else {})


@dataclass(frozen=True)
class Scorer:
    """Forward pass of a teacher's weights over a forest, which computes shared tokens once."""

    logprobs_fn: Callable[..., list[Any]]  # of `TrainFunctions`, or one of another model's
    batch: BatchConfig
    mesh: Mesh

    def __call__(self, params: Params, sequences: Sequence[TrainingSequence]) -> Scores:
        """Return the log-probabilities of each response, 0 where a token is not trained.

        They are at the temperature of the sequence. One that fits no row, with the hint in its
        prompt if there is one, has None.
        """
        batches, _ = make_batches([_read_by_teacher(item) for item in sequences], self.batch)
        sharded = put_on_mesh(batches, batch_sharding(self.mesh))
        measured = to_host(measure(self.logprobs_fn, sharded, params))
        found = by_sequence(batches, measured, len(sequences))
        return [
            None if scores is None else _spread(scores, item)
            for item, scores in zip(sequences, found, strict=True)
        ]


def _read_by_teacher(sequence: TrainingSequence) -> TrainingSequence:
    """Return what the teacher reads: its own prompt, and the response ids that were sampled."""
    prompt = sequence.teacher_prompt_ids or sequence.prompt_token_ids
    return replace(sequence, prompt_token_ids=prompt, states=None)


def _spread(scores: Sequence[float], sequence: TrainingSequence) -> tuple[float, ...]:
    """Return the scores of the trained tokens at their places in the response."""
    rest = iter(scores)
    return tuple(next(rest) if trained else 0.0 for trained in sequence.loss_mask)


def make_scorer(model: DecoderConfig, batch: BatchConfig, *, mesh: Mesh, dtype: str) -> Scorer:
    """Return the scorer of a model that is not trained, which computes in `dtype`."""
    forward = ForwardPass(
        model,
        head_chunk=batch.head_chunk,
        remat=False,
        compute_dtype=jnp.dtype(dtype),
        entropy_gradient=False,
        gather=make_gather(model, mesh),
    )
    return Scorer(jax.jit(map_bundle(forward.logprobs)), batch, mesh)
