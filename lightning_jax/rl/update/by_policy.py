"""Separate updates of policies with their own weights, and their joint metrics.

Losses are sums over tokens, so the gradient of one policy's weights comes only from its own calls,
even with joint credit. Policies are therefore updated one after the other, with the gradients of
only one in memory.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_jax.rl.gae import CallValues
from lightning_jax.rl.losses.policy import is_maximum, tokens_metric
from lightning_jax.rl.scope import ALL, PolicyScope
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.types import Metrics, Trajectory

NORMS = ("train/grad_norm", "train/value_grad_norm")
RATES = {
    "train/tokens_per_s": "train/tokens_naive",
    "train/forest_tokens_per_s": "train/tokens_forest",
}
SUMS = (
    "time/", "train/loss", "train/value_loss", "train/value_clip_fraction", "train/num_",
    "train/tokens_", "train/dropped_", "train/skipped_updates", "train/without_teacher",
    "train/other_temperature",
)  # fmt: skip


def sequences_of(
    scope: PolicyScope, sequences: Sequence[TrainingSequence]
) -> list[TrainingSequence]:
    """Return the scope's sequences. Those of one policy are marked for a learner of one."""
    if scope == ALL:
        return list(sequences)
    return [replace(item, adapter=None) for item in sequences if item.adapter == scope.index]


def join_values(
    trajectories: Sequence[Trajectory],
    scopes: Sequence[PolicyScope],
    values_by_scope: Sequence[Sequence[tuple[CallValues, ...]]],
) -> list[tuple[CallValues, ...]]:
    """Merge the values that each scope's critic found of its calls into those of all calls."""
    if scopes[0] == ALL:
        return list(values_by_scope[0])
    joined = []
    for trajectory, *parts in zip(trajectories, *values_by_scope, strict=True):
        rest = {scope.policy: iter(part) for scope, part in zip(scopes, parts, strict=True)}
        joined.append(tuple(next(rest[call.answered_by]) for call in trajectory.transitions))
    return joined


def join_metrics(scopes: Sequence[PolicyScope], rows: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of the update of each scope's weights into one row.

    The row of `ALL` stays as it is. Otherwise each policy's own metrics are added as
    `train/entropy/policy=writer`. Counts, losses and seconds are summed, maxima stay maxima, norms
    are those of all gradients together, and the rest are means over trained tokens.
    `train/skipped_updates` is 1 if no policy learned; otherwise policies that had nothing to learn
    from do not count.
    """
    if scopes[0] == ALL:
        return rows[0]
    names = dict.fromkeys(name for row in rows for name in row)
    joined = {name: _join(name, [row for row in rows if name in row]) for name in names}
    learned = [row["train/skipped_updates"] for row in rows if row["train/num_updates"]]
    joined["train/skipped_updates"] = sum(learned) if learned else 1.0
    for scope, row in zip(scopes, rows, strict=True):
        of_training = {name: value for name, value in row.items() if name.startswith("train/")}
        joined |= {f"{name}{scope.suffix}": value for name, value in of_training.items()}
    return joined


def _join(name: str, rows: Sequence[Metrics]) -> float:
    """Merge the values that the rows have under `name`."""
    values = [row[name] for row in rows]
    if name in RATES:  # the updates ran one after the other
        tokens = [row[RATES[name]] for row in rows]
        seconds = sum(n / value for n, value in zip(tokens, values, strict=True))
        return sum(tokens) / seconds
    if is_maximum(name):
        return max(values)
    if name in NORMS:
        return math.hypot(*values)
    if name.startswith(SUMS):
        return sum(values)
    weights = [row.get(tokens_metric(name), 0.0) for row in rows]
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(w * value for w, value in zip(weights, values, strict=True)) / total
