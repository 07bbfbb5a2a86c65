"""Packing of trajectories into batches of fixed shape.

Each shared token appears once, and each sampled token is one target.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.batches.masks import table_shape
from lightning_jax.rl.batches.packing import PackedRow, Path, PathForest, pack_rows
from lightning_jax.rl.batches.rows import Contents, empty_row, fill_row
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.sequence import StateValues, TrainingSequence
from lightning_jax.rl.token_weights import token_weights, weigh_states
from lightning_jax.types import Advantage, Trajectory

TOO_LARGE = ("too_long", "too_many_targets")
DROP_REASONS: tuple[str, ...] = (*TOO_LARGE, "empty_response", "all_forced", "zero_advantage")


def make_sequences(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[tuple[Advantage, ...]],
    *,
    states: Sequence[tuple[StateValues | None, ...]] | None = None,
    aggregation: str = "rollout",
    token_divisor: float = 1.0,
    adapters: Mapping[str, int] | None = None,
) -> list[TrainingSequence]:
    """Build one sequence per call, with token weights from `token_weights`.

    All states that a critic learns from have equal weights, which sum to 1. A token that a grammar
    forced is not trained, because the policy did not choose it. With several policies, `adapters`
    maps each policy to its adapter index. Raises ValueError if the advantages do not match the
    calls.
    """
    weights = token_weights(trajectories, aggregation=aggregation, divisor=token_divisor)
    sequences = []
    states = weigh_states(states or [(None,) * len(values) for values in advantages])
    groups: dict[str, int] = {}
    for index, (trajectory, values, calls, of_calls) in enumerate(
        zip(trajectories, advantages, weights, states, strict=True)
    ):
        group = groups.setdefault(trajectory.group_id, len(groups))
        if len(values) != len(trajectory.transitions):
            raise InvalidValue.mismatch(
                trajectory.rollout_id,
                f"rollout {trajectory.rollout_id!r} has {len(values)} advantages for "
                f"{len(trajectory.transitions)} calls; pass one for each call",
            )
        for transition, advantage, weight, of_call in zip(
            trajectory.transitions, values, calls, of_calls, strict=True
        ):
            sequences.append(
                TrainingSequence(
                    prompt_token_ids=transition.prompt_token_ids,
                    response_token_ids=transition.response_token_ids,
                    behavior_logprobs=transition.tempered_logprobs or transition.behavior_logprobs,
                    advantage=advantage,
                    weight=weight,
                    loss_mask=tuple(not forced for forced in transition.forced),
                    states=of_call,
                    adapter=adapters[transition.answered_by] if adapters else None,
                    temperature=transition.temperature,
                    rollout=index,
                    group=group,
                    sampling_logprobs=transition.sampling_logprobs,
                    grammar=transition.grammar,
                )
            )
    return sequences


def make_supervised_sequences(
    examples: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[TrainingSequence]:
    """Build one sequence per (prompt ids, target ids), with equal weight for every target token."""
    weight = 1.0 / max(sum(len(targets) for _, targets in examples), 1)
    return [
        TrainingSequence(tuple(prompt), tuple(targets), (0.0,) * len(targets), 1.0, weight)
        for prompt, targets in examples
    ]


def make_batches(
    sequences: Sequence[TrainingSequence],
    config: BatchConfig,
    *,
    skip_zero_advantage: bool = False,
) -> tuple[list[Batch], dict[str, float]]:
    """Return (microbatches, packing metrics).

    Microbatches have shape [rows, row_len], with [rows, max_targets] targets. Every trained token
    becomes one target. Forced tokens are only context, counted in `train/tokens_forced`. The LM
    head runs once for targets that are the same token after the same node, counted in
    `train/num_distinct_targets`. Sequences are dropped and counted by reason: too long for a row,
    too many targets for a row, nothing sampled, or only forced tokens. With `skip_zero_advantage`,
    so are sequences without a policy gradient, which is correct only without a KL term. The model
    does not read a sequence's last target or later tokens unless another sequence continues there.
    `target_calls` holds indices into `sequences`. Sequences of different adapters never share a
    row.
    """
    kept, dropped = [], Counter(dict.fromkeys(DROP_REASONS, 0))
    dropped_tokens = 0
    for index, sequence in enumerate(sequences):
        reason = why_dropped(sequence, config, skip_zero_advantage)
        if reason is None:
            kept.append((index, sequence))
        else:
            dropped[reason] += 1
            dropped_tokens += _num_targets(sequence)
    # Sorted paths are the trie in depth-first order; see packing.py.
    kept.sort(key=lambda pair: (pair[1].adapter or 0, _read_ids(pair[1])))
    paths = [np.asarray(_read_ids(sequence), np.int32) for _, sequence in kept]
    rows = _pack(paths, [sequence for _, sequence in kept], config)
    table = table_shape(([kept[i][1] for i in row.members] for row in rows), config.max_targets)
    contents = Contents.of(sequences, table)
    filled = [fill_row(empty_row(config, contents), row, kept, paths) for row in rows]
    # Sorting puts rows with similar numbers of pairs together, so their empty head chunks coincide.
    filled.sort(key=_num_distinct, reverse=True)
    batches = []
    for start in range(0, len(filled), config.rows):
        some = filled[start : start + config.rows]
        some += [empty_row(config, contents) for _ in range(config.rows - len(some))]
        batches.append(jax.tree.map(lambda *leaves: np.stack(leaves), *some))
    stats = _stats(paths, rows, config, num_nodes=len(batches) * config.rows * config.row_len)
    stats["train/num_distinct_targets"] = float(sum(map(_num_distinct, filled)))
    stats |= {f"train/dropped_{reason}": float(count) for reason, count in dropped.items()}
    num_forced = sum(sequence.loss_mask.count(False) for sequence in sequences)
    return batches, stats | {
        "train/dropped_tokens": float(dropped_tokens),
        "train/tokens_forced": float(num_forced),
    }


def why_dropped(
    sequence: TrainingSequence, config: BatchConfig, skip_zero_advantage: bool = False
) -> str | None:
    """Return the entry of `DROP_REASONS` that excludes the sequence, or None if it is trained."""
    num_targets = _num_targets(sequence)
    if num_targets == 0:
        return "all_forced" if sequence.response_token_ids else "empty_response"
    if skip_zero_advantage and sequence.advantage == 0.0 and not sequence.teacher_coef:
        return "zero_advantage"
    if len(_read_ids(sequence)) > config.row_len:
        return "too_long"
    return "too_many_targets" if num_targets > config.max_targets else None


def _pack(
    paths: Sequence[Path], sequences: Sequence[TrainingSequence], config: BatchConfig
) -> list[PackedRow]:
    """Pack the sequences of each adapter into rows. They must be sorted by adapter."""
    counts = Counter(sequence.adapter for sequence in sequences)
    rows, start = [], 0
    for count in counts.values():
        part = slice(start, start + count)
        forest = PathForest(paths[part], [_num_targets(sequence) for sequence in sequences[part]])
        packed = pack_rows(forest, max_nodes=config.row_len, max_targets=config.max_targets)
        rows += [
            PackedRow([start + i for i in row.members], row.nodes, row.targets) for row in packed
        ]
        start += count
    return rows


def _stats(
    paths: Sequence[Path], rows: Sequence[PackedRow], config: BatchConfig, *, num_nodes: int
) -> dict[str, float]:
    """Return packing metrics: tokens before and after packing, padding and share of targets."""
    used, targets = sum(row.nodes for row in rows), sum(row.targets for row in rows)
    return {
        "train/num_sequences": float(len(paths)),
        "train/num_rows": float(len(rows)),
        "train/tokens_naive": float(sum(map(len, paths))),
        "train/tokens_forest": float(used),
        "train/padding_share": 1.0 - used / num_nodes if num_nodes else 0.0,
        "train/targets_share": targets / (max(len(rows), 1) * config.max_targets),
    }


def _num_distinct(row: Batch) -> int:
    return int((row.distinct.ids >= 0).sum())


def _num_targets(sequence: TrainingSequence) -> int:
    return sequence.loss_mask.count(True)


def _read_ids(sequence: TrainingSequence) -> tuple[int, ...]:
    """Return the tokens that the model reads: all tokens before the last target.

    For response 7 8 9 6 with 6 forced, these are the prompt and 7 8.
    """
    last = max((i for i, trained in enumerate(sequence.loss_mask) if trained), default=0)
    return sequence.prompt_token_ids + sequence.response_token_ids[:last]
