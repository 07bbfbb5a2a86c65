"""Rows of a batch on the host: padding, and the sequences written into it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from lightning_jax.rl.batches.batch import (
    NO_TOKEN,
    Batch,
    DistinctTargets,
    StateBatch,
    TeacherBatch,
    TopTokens,
)
from lightning_jax.rl.batches.masks import empty_masks, enter_masks
from lightning_jax.rl.batches.packing import PackedRow, Path, common_prefix
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.sequence import TrainingSequence


@dataclass(frozen=True)
class Contents:
    """Arrays that the rows of a step have beside those of any row."""

    has_states: bool
    has_adapters: bool
    is_tempered: bool
    is_taught: bool
    top_k: int  # tokens that the teacher named at each target; 0: none
    kl: str  # `TopTokens.kl`, the same for all sequences
    table: tuple[int, int] | None  # shape of a row's masks; None: no sequence has any

    @classmethod
    def of(
        cls, sequences: Sequence[TrainingSequence], table: tuple[int, int] | None = None
    ) -> "Contents":
        """Return the contents of the sequences. `table` is `masks.table_shape` of their rows."""
        scores = [item.teacher_scores for item in sequences if item.teacher_scores is not None]
        named = [some.top.ids.shape[1] for some in scores if some.top is not None]
        return cls(
            any(item.states is not None for item in sequences),
            any(item.adapter is not None for item in sequences),
            any(item.temperature != 1.0 for item in sequences),
            bool(scores),
            max(named, default=0),
            sequences[0].teacher_kl if sequences else "",
            table,
        )


def empty_row(config: BatchConfig, contents: Contents) -> Batch:
    """Build a row that is all padding, with each node a tree of its own."""

    def ints() -> Int[np.ndarray, " R"]:
        return np.zeros(config.max_targets, np.int32)

    def floats() -> Float[np.ndarray, " R"]:
        return np.zeros(config.max_targets, np.float32)

    top = None
    if contents.top_k:
        shape = (config.max_targets, contents.top_k)
        nothing = np.full(shape, NO_TOKEN, np.float32)
        top = TopTokens(np.zeros(shape, np.int32), nothing, contents.kl)
    return Batch(
        tokens=np.zeros(config.row_len, np.int32),
        positions=np.zeros(config.row_len, np.int32),
        ends=np.arange(1, config.row_len + 1, dtype=np.int32),
        target_nodes=ints(),
        target_ids=ints(),
        target_mask=np.zeros(config.max_targets, bool),
        target_calls=ints() - 1,
        behavior_logprobs=floats(),
        advantages=floats(),
        weights=floats(),
        states=StateBatch(ints(), floats(), floats(), floats()) if contents.has_states else None,
        adapters=np.zeros((), np.int32) if contents.has_adapters else None,
        distinct=DistinctTargets(
            nodes=ints(),
            ids=ints() - 1,
            of_targets=ints(),
            temperatures=floats() + 1 if contents.is_tempered else None,
            masks=empty_masks(contents.table, config.max_targets),
        ),
        teacher=TeacherBatch(floats(), floats(), top) if contents.is_taught else None,
    )


def _lay_out(
    paths: Sequence[Path],
    tokens: Int[np.ndarray, " R"],
    positions: Int[np.ndarray, " R"],
    ends: Int[np.ndarray, " R"],
) -> list[Path]:
    """Write the trie of sorted paths into a row, depth first, and return the nodes of each path.

    Paths 5 6 7, 5 6 7 9 and 5 8 become tokens 5 6 7 9 8, positions 0 1 2 3 1, ends 5 4 4 4 5.
    """
    num_nodes, nodes, all_nodes = 0, np.zeros(0, np.int64), []
    previous = paths[0][:0]
    for path in paths:
        shared = common_prefix(previous, path)
        ends[nodes[shared:]] = num_nodes  # no later path extends these nodes
        new = np.arange(num_nodes, num_nodes + len(path) - shared)
        tokens[new] = path[shared:]
        positions[new] = np.arange(shared, len(path))
        nodes = np.concatenate([nodes[:shared], new])
        num_nodes += len(new)
        all_nodes.append(nodes)
        previous = path
    ends[nodes] = num_nodes
    return all_nodes


def fill_row(
    out: Batch,
    row: PackedRow,
    sequences: Sequence[tuple[int, TrainingSequence]],
    paths: Sequence[Path],
) -> Batch:
    """Write the row's sequences into `out`, an empty row, and return it."""
    nodes = _lay_out([paths[i] for i in row.members], out.tokens, out.positions, out.ends)
    if out.adapters is not None:
        out.adapters[...] = sequences[row.members[0]][1].adapter or 0
    start, temperatures = 0, np.ones(out.target_ids.shape)
    readers = np.zeros(out.target_ids.shape)  # indices of the prompts that the teacher read
    masks, known_masks = np.zeros(out.target_ids.shape), dict[bytes, int]()
    prompts: dict[tuple[int, ...], int] = {}
    for i, path_nodes in zip(row.members, nodes, strict=True):
        call, sequence = sequences[i]
        trained = np.flatnonzero(sequence.loss_mask)
        where = slice(start, start + len(trained))
        # The last token of the prompt predicts the first sampled token.
        first = len(sequence.prompt_token_ids) - 1
        out.target_nodes[where] = path_nodes[first + trained]
        out.target_ids[where] = np.asarray(sequence.response_token_ids)[trained]
        out.target_mask[where] = True
        out.target_calls[where] = call
        out.behavior_logprobs[where] = np.asarray(sequence.behavior_logprobs)[trained]
        out.advantages[where] = sequence.advantage
        out.weights[where] = sequence.weight
        temperatures[where] = sequence.temperature
        if sequence.masks:
            masks[where] = enter_masks(out.distinct.masks, known_masks, sequence)
        if sequence.states is not None:
            places = slice(start, start + len(sequence.states.positions))
            out.states.nodes[places] = path_nodes[first + np.asarray(sequence.states.positions)]
            out.states.values[places] = sequence.states.values
            out.states.returns[places] = sequence.states.returns
            out.states.weights[places] = sequence.states.weight
        if sequence.teacher_scores is not None:
            _fill_scores(out.teacher, where, sequence, trained)
            if out.teacher.top is not None:
                reader = prompts.setdefault(sequence.teacher_prompt_ids, len(prompts) + 1)
                readers[where] = reader
        start += len(trained)
    _fill_distinct(out, start, temperatures, masks, readers)
    return out


def _fill_scores(
    out: TeacherBatch,
    where: slice,
    sequence: TrainingSequence,
    trained: Int[np.ndarray, " N"],
) -> None:
    """Write the teacher's scores of a sequence, with its likeliest tokens at each target."""
    scores = sequence.teacher_scores
    assert scores is not None, "the caller checks"
    out.logprobs[where] = np.asarray(scores.logprobs)[trained]
    out.coefs[where] = sequence.teacher_coef
    if scores.top is not None:
        out.top.ids[where] = scores.top.ids[trained]
        out.top.logprobs[where] = scores.top.logprobs[trained]


def _fill_distinct(
    out: Batch,
    number: int,
    temperatures: Float[np.ndarray, " R"],
    masks: Float[np.ndarray, " R"],
    readers: Float[np.ndarray, " R"],
) -> None:
    """Write the distinct pairs of a row's first `number` targets.

    The teacher's likeliest tokens move from the targets to the pairs. Targets for which the teacher
    read different prompts share no pair, nor do those with different masks.
    """
    keys = (out.target_nodes, out.target_ids, temperatures, masks, readers)
    distinct, first, target_indices = np.unique(
        np.stack([key[:number] for key in keys]), axis=1, return_index=True, return_inverse=True
    )
    pairs = slice(distinct.shape[1])
    out.distinct.nodes[pairs], out.distinct.ids[pairs] = distinct[:2]
    if out.distinct.temperatures is not None:
        out.distinct.temperatures[pairs] = distinct[2]
    if out.distinct.masks is not None:
        out.distinct.masks.of_pairs[pairs] = distinct[3]
    out.distinct.of_targets[:number] = target_indices.ravel()
    if out.teacher is not None and out.teacher.top is not None:
        top, rest = out.teacher.top, slice(pairs.stop, number)
        top.ids[pairs], top.logprobs[pairs] = top.ids[first], top.logprobs[first]
        top.ids[rest], top.logprobs[rest] = 0, NO_TOKEN
