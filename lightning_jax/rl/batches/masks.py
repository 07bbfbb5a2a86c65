"""Masks of a grammar in training: their replay on the host, and their tables in a batch.

A response that followed a grammar was sampled from the masked policy, so the loss needs the same
masks. A span has the grammar's text. The masks after each of its tokens are made again from it.
"""

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from lightning_jax.engine.grammar.compiler import GrammarCompiler
from lightning_jax.engine.grammar.process import GrammarError, GrammarProcessLost
from lightning_jax.rl.batches.batch import MaskBatch
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.types import Metrics

log = logging.getLogger(__name__)

MOST_LOST = 0.1  # mass that a mask or filter may take from a token's distribution unnoticed
# Masks in a row's table are 64, 256, 1024 and so on, so that few shapes are compiled.
SMALLEST_TABLE, GROWTH = 64, 4


def with_masks(
    sequences: Sequence[TrainingSequence], grammars: GrammarCompiler
) -> tuple[list[TrainingSequence], Metrics]:
    """Return (the sequences with the masks that their tokens were sampled under, metrics).

    Their `behavior_logprobs` become those of the masked policy. A response that its grammar does
    not give again stays without masks, and counts in `train/calls_without_mask`. The metrics are
    empty without a grammar.
    """
    started, results, num_failed = time.monotonic(), list(sequences), 0
    mask_objects: dict[bytes, bytes] = {}  # one object for equal masks
    waiting = [index for index, item in enumerate(sequences) if _waits_for_masks(item)]
    # Sequences of one grammar come together, because few grammars have a process at once.
    for index in sorted(waiting, key=lambda index: sequences[index].grammar or ""):
        item = sequences[index]
        try:
            masks = _replay(item, grammars, mask_objects)
        except (GrammarError, GrammarProcessLost, OSError) as error:
            log.debug("a grammar was not replayed: %s", error)
            num_failed += 1
        else:
            results[index] = replace(item, masks=masks, behavior_logprobs=item.sampling_logprobs)
    if not waiting:
        return results, {}
    return results, {
        "train/calls_without_mask": float(num_failed),
        "time/masks_s": time.monotonic() - started,
    }


def _waits_for_masks(sequence: TrainingSequence) -> bool:
    is_sampled = bool(sequence.sampling_logprobs) and any(sequence.loss_mask)
    return sequence.grammar is not None and is_sampled and not sequence.masks


def _replay(
    sequence: TrainingSequence, grammars: GrammarCompiler, mask_objects: dict[bytes, bytes]
) -> tuple[bytes, ...]:
    """Return the mask of each token of the response. Tokens after the last trained one have none.

    Raises GrammarError if the grammar does not allow the response.
    """
    assert sequence.grammar is not None, "the caller asks only for those with a grammar"
    response, masks = sequence.response_token_ids, []
    last = max(i for i, is_trained in enumerate(sequence.loss_mask) if is_trained)
    matcher = grammars.open(sequence.grammar)
    try:
        for place, token_id in enumerate(response[: last + 1]):
            if place:
                matcher.push(response[place - 1])
            packed = matcher.packed()
            if not packed[token_id // 8] >> (token_id % 8) & 1:
                raise GrammarError(f"token {token_id} is not allowed", "token_does_not_fit")
            mask = packed.tobytes()
            masks.append(mask_objects.setdefault(mask, mask))
    finally:
        matcher.close()
    return (*masks, *[b""] * (len(response) - len(masks)))


def mask_metrics(sequences: Sequence[TrainingSequence]) -> Metrics:
    """Return the shares of trained tokens whose mask the loss knows, and of others with one.

    At the latter, a mask or a filter took more than `MOST_LOST` of the mass of the distribution
    that the loss knows. Empty if no sequence has a trained token that was sampled.
    """
    sampled = [item for item in sequences if item.sampling_logprobs and any(item.loss_mask)]
    if not sampled:
        return {}
    kept = np.concatenate([_log_kept(item) for item in sampled])
    num_masked = sum(item.loss_mask.count(True) for item in sampled if item.masks)
    return {
        "train/masked_share": num_masked / len(kept),
        "train/adjusted_share": float((kept < math.log1p(-MOST_LOST)).mean()),
    }


def _log_kept(sequence: TrainingSequence) -> np.ndarray:
    """Return the log of the mass that was left to each trained token's distribution."""
    gaps = np.subtract(sequence.behavior_logprobs, sequence.sampling_logprobs)
    return gaps[np.asarray(sequence.loss_mask, bool)]


def table_shape(
    rows: Iterable[Iterable[TrainingSequence]], max_targets: int
) -> tuple[int, int] | None:
    """Return (masks, bytes of a mask) of a table for the sequences of any row, or None."""
    most, num_bytes = 0, 0
    for row in rows:
        masks = {mask for sequence in row for mask in sequence.masks} - {b""}
        most = max(most, len(masks))
        num_bytes = max([num_bytes, *map(len, masks)])
    if not most:
        return None
    size = SMALLEST_TABLE
    while size < most + 1:  # the first mask of a table allows everything
        size *= GROWTH
    return min(size, max(max_targets + 1, SMALLEST_TABLE)), num_bytes


def empty_masks(shape: tuple[int, int] | None, num_pairs: int) -> MaskBatch | None:
    """Return the table of a row without a mask, or None without a shape."""
    if shape is None:
        return None
    return MaskBatch(np.full(shape, 0xFF, np.uint8), np.zeros(num_pairs, np.int32))


def enter_masks(
    out: MaskBatch, index_of: dict[bytes, int], sequence: TrainingSequence
) -> list[int]:
    """Write the masks of the trained tokens into a row's table, and return their indices.

    `index_of` has those of the row's earlier sequences, and gets the new ones.
    """
    indices = []
    for mask, is_trained in zip(sequence.masks, sequence.loss_mask, strict=True):
        if not is_trained:
            continue
        if mask not in index_of:
            index_of[mask] = len(index_of) + 1
            out.table[index_of[mask]] = np.frombuffer(mask, np.uint8)
        indices.append(index_of[mask])
    return indices
