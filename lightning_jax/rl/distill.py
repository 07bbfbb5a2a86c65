"""Distillation on the policy's own samples: sequences that a teacher scores, and their scores.

A teacher is any model with the policy's vocabulary, or the policy itself with a hint. It reads what
the policy read, or that and a hint. At each token that the policy sampled it names the
tokens that it finds likeliest. The loss is the KL to these (`losses/surrogates.py`). A teacher that
scores only the sampled tokens gives advantages instead.

The policy never reads a hint. It stands at the end of the last message before a conversation's
first response, which is the question. A call that begins otherwise but repeats that message, such
as one without tools, also has the hint there. Later calls of a conversation have it at the same
place, so the teacher's sequences of a rollout share their beginnings like the policy's:

    policy    [system][user ... <end>][assistant response]
    teacher   [system][user ... HINT <end>][assistant response]

Only the prompt ids change. Response ids stay those that the policy sampled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.sharding import make_gather, to_host
from lightning_jax.models.transformer import Params
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.batches.microbatches import (
    by_sequence,
    map_bundle,
    measure,
    place_batches,
)
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.sequence import LikelyTokens, TeacherScores, TrainingSequence
from lightning_jax.rl.update.forward_pass import ForwardPass
from lightning_jax.rl.update.logprobs import TargetScores
from lightning_jax.types import Advantage, Metrics

Scores = list[TeacherScores | None]  # of each response; None: not scored
TokenIds = tuple[int, ...]
# Prompt that the teacher reads, by rollout of the step and the prompt that the policy read.
HintedPrompts = Mapping[tuple[int, TokenIds], TokenIds]


def weigh_teacher(
    sequences: Sequence[TrainingSequence], *, coef: float, reward_coef: float, kl: str = "forward"
) -> list[TrainingSequence]:
    """Return the sequences with `coef` for the teacher, and advantages times `reward_coef`.

    `kl` is `DistillConfig.kl`.
    """
    return [
        replace(
            item, teacher_coef=coef, teacher_kl=kl, advantage=_times(item.advantage, reward_coef)
        )
        for item in sequences
    ]


def _times(advantage: Advantage, factor: float) -> Advantage:
    if isinstance(advantage, tuple):
        return tuple(factor * value for value in advantage)
    return factor * advantage


def waits_for_teacher(sequence: TrainingSequence) -> bool:
    """Return True if a teacher should score the sequence and has not."""
    return sequence.teacher_coef > 0 and sequence.teacher_scores is None


def with_scores(sequences: Sequence[TrainingSequence], scores: Scores) -> list[TrainingSequence]:
    """Return the sequences with the scores of those that wait for a teacher, in order.

    A sequence without scores learns without a teacher.
    """
    rest = iter(scores)
    return [_scored(item, next(rest)) if waits_for_teacher(item) else item for item in sequences]


def _scored(sequence: TrainingSequence, scores: TeacherScores | None) -> TrainingSequence:
    if scores is None:
        return replace(sequence, teacher_coef=0.0)
    return replace(sequence, teacher_scores=scores)


def teacher_metrics(sequences: Sequence[TrainingSequence]) -> Metrics:
    """Return the reverse KL to the teacher at the tokens it scored, and their share.

    The KL is the mean of the sampler's log-probability less the teacher's, in nats. It is left out
    if no token was scored. So is the teacher's probability of the tokens it named, if it named
    none.
    """
    gaps: list[float] = []
    named: list[float] = []
    for item in sequences:
        scores, trained = item.teacher_scores, np.asarray(item.loss_mask, bool)
        if scores is None:
            continue
        pairs = np.asarray([item.behavior_logprobs, scores.logprobs])[:, trained]
        gaps += (pairs[0] - pairs[1]).tolist()
        if scores.top is not None:
            named += np.exp(scores.top.logprobs[trained]).sum(axis=1).tolist()
    total = sum(item.loss_mask.count(True) for item in sequences)
    metrics = {"train/teacher_share": len(gaps) / max(total, 1)}
    means = {"train/kl_to_teacher": gaps, "train/teacher_named_mass": named}
    return metrics | {name: sum(some) / len(some) for name, some in means.items() if some}


def count_unscored(scores: Scores, *, by_server: bool) -> Metrics:
    """Return the number of calls without scores.

    A server refuses a sequence that is too long for it, so it left these out for their temperature.
    """
    number = float(scores.count(None))
    return {"train/without_teacher": number, "train/other_temperature": by_server * number}


@dataclass(frozen=True)
class TeacherScorer:
    """Forward pass of a teacher's weights over a forest, which computes shared tokens once."""

    scores_fn: Callable[..., list[TargetScores]]  # of `TrainFunctions`, or of another model
    batch: BatchConfig
    mesh: Mesh
    top_k: int = 0  # likeliest tokens to name at each target

    def __call__(self, params: Params, sequences: Sequence[TrainingSequence]) -> Scores:
        """Return the scores of each response, at the temperature of the sequence.

        A sequence that fits no row, with the hint in its prompt if there is one, has None.
        """
        prompts = [item.teacher_prompt_ids or item.prompt_token_ids for item in sequences]
        readable = [
            replace(item, prompt_token_ids=prompt, states=None, teacher_scores=None)
            for item, prompt in zip(sequences, prompts, strict=True)
        ]
        batches, _ = make_batches(readable, self.batch)
        sharded = place_batches(batches, self.batch, self.mesh)
        measured = to_host(measure(self.scores_fn, sharded, params, self.top_k))
        all_scores = by_sequence(batches, measured, len(sequences))
        return [
            None if scores is None else _spread(scores, item)
            for item, scores in zip(sequences, all_scores, strict=True)
        ]


def _spread(scores: TargetScores, sequence: TrainingSequence) -> TeacherScores:
    """Return the scores of the trained tokens at their places in the response."""
    trained = np.asarray(sequence.loss_mask, bool)

    def spread(values: Any) -> Any:
        rows = np.zeros((len(trained), *values.shape[1:]), values.dtype)
        rows[trained] = values
        return rows

    top = None
    if scores.top_ids is not None:
        top = LikelyTokens(spread(scores.top_ids), spread(scores.top_logprobs))
    return TeacherScores(tuple(spread(scores.logprobs).tolist()), top)


def make_scorer(
    model: DecoderConfig,
    batch: BatchConfig,
    *,
    mesh: Mesh,
    dtype: str,
    top_k: int = 0,
    num_ids: int | None = None,
) -> TeacherScorer:
    """Return the scorer of a model that is not trained, which computes in `dtype`.

    It names `top_k` tokens at each target, with ids below `num_ids`.
    """
    forward = ForwardPass(
        model,
        head_chunk=batch.chunk_of(model.shape.vocab_size),
        remat="none",
        compute_dtype=jnp.dtype(dtype),
        entropy_gradient=False,
        gather=make_gather(model, mesh),
        num_ids=num_ids,
    )
    scores_fn = jax.jit(map_bundle(forward.scores), static_argnums=3)
    return TeacherScorer(scores_fn, batch, mesh, top_k)


def hint_positions(prompts: Sequence[TokenIds], end_id: int) -> list[int | None]:
    """Return the index at which a hint goes into each prompt of a rollout, None if nowhere.

    `prompts` are in the order of the calls. `end_id` ends a message.
    """
    begun: list[TokenIds] = []  # conversations, up to the end of the message before a response
    questions: set[TokenIds] = set()  # these messages
    positions: list[int | None] = []
    for prompt in prompts:
        prefixes = [start for start in begun if prompt[: len(start)] == start]
        if prefixes:
            positions.append(max(map(len, prefixes)) - 1)
        elif end_id in prompt:
            messages = _messages(prompt, end_id)
            repeated = (item for item in messages if item[1] in questions)
            position, question = next(repeated, messages[-1])
            begun.append(prompt[: position + 1])
            questions.add(question)
            positions.append(position)
        else:  # not made of messages
            positions.append(None)
    return positions


def _messages(prompt: TokenIds, end_id: int) -> list[tuple[int, TokenIds]]:
    """Return (the index of its end, its ids before the end) for each message of a prompt."""
    ends = [index for index, token in enumerate(prompt) if token == end_id]
    starts = [0, *(end + 1 for end in ends)]
    return [(end, prompt[start:end]) for start, end in zip(starts, ends, strict=False)]


def insert_hints(
    prompts: Sequence[TokenIds], hint_ids: Sequence[int], end_id: int
) -> list[TokenIds | None]:
    """Return each prompt of a rollout with the hint in it, None if it has no position for one."""
    return [
        None if position is None else (*prompt[:position], *hint_ids, *prompt[position:])
        for prompt, position in zip(prompts, hint_positions(prompts, end_id), strict=True)
    ]


def with_hints(
    sequences: Sequence[TrainingSequence], hinted: HintedPrompts
) -> list[TrainingSequence]:
    """Return the sequences with the teacher's prompts. Without one, a sequence has no teacher."""
    return [_with_hint(sequence, hinted) for sequence in sequences]


def _with_hint(sequence: TrainingSequence, hinted: HintedPrompts) -> TrainingSequence:
    if sequence.rollout is None:
        return replace(sequence, teacher_coef=0.0)
    prompt = hinted.get((sequence.rollout, sequence.prompt_token_ids))
    if prompt is None:
        return replace(sequence, teacher_coef=0.0)
    return replace(sequence, teacher_prompt_ids=prompt)
