"""Policies with weights of their own: what each learns from, and one account of what all learned.

Losses are sums over tokens, so the gradient of one policy's weights comes from its own calls alone,
whether credit is joint or not. Each therefore makes its update by itself, one after the other, and
the gradients of only one are in memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_jax.metrics import Metrics
from lightning_jax.rl.losses import is_maximum
from lightning_jax.rl.values import CallValues
from lightning_jax.types import TrainingSequence, Trajectory

NORMS = ("train/grad_norm", "train/value_grad_norm")
RATES = {
    "train/tokens_per_s": "train/tokens_naive",
    "train/forest_tokens_per_s": "train/tokens_forest",
}
SUMS = (
    "time/", "train/loss", "train/value_loss", "train/value_clip_fraction", "train/num_",
    "train/tokens_", "train/dropped_", "train/skipped_updates"
)  # fmt: skip


def own_sequences(sequences: Sequence[TrainingSequence], place: int) -> list[TrainingSequence]:
    """Those of the policy at that place, as its own learner, which knows no other, reads them."""
    return [replace(each, adapter=None) for each in sequences if each.adapter == place]


def join_values(
    trajectories: Sequence[Trajectory],
    by_policy: Mapping[str, Sequence[Sequence[CallValues]]],
) -> list[tuple[CallValues, ...]]:
    """The values of all calls, from those that each policy's critic gave to `own_calls` of it."""
    joined = []
    for index, trajectory in enumerate(trajectories):
        rest = {name: iter(values[index]) for name, values in by_policy.items()}
        joined.append(tuple(next(rest[call.answered_by]) for call in trajectory.transitions))
    return joined


def join_metrics(rows: Mapping[str, Metrics]) -> Metrics:
    """One row of the metrics of each policy's update, of at least one policy, and theirs named like
    `train/entropy/policy=writer`.

    Counts, losses and seconds are added, maxima stay maxima, norms are those of all gradients
    together, and the rest are means over trained tokens. Policies that had nothing to learn from
    are skipped once, and not at all where others learned.
    """
    names = dict.fromkeys(name for row in rows.values() for name in row)
    joined = {name: _join(name, [row for row in rows.values() if name in row]) for name in names}
    learned = [row["train/skipped_updates"] for row in rows.values() if row["train/num_updates"]]
    joined["train/skipped_updates"] = sum(learned) if learned else 1.0
    for policy, row in rows.items():
        of_training = {name: value for name, value in row.items() if name.startswith("train/")}
        joined |= {f"{name}/policy={policy}": value for name, value in of_training.items()}
    return joined


def _join(name: str, rows: Sequence[Metrics]) -> float:
    """One number of those that the rows have under this name."""
    values = [row[name] for row in rows]
    if name in RATES:  # they were made one after the other
        tokens = [row[RATES[name]] for row in rows]
        seconds = sum(n / value for n, value in zip(tokens, values, strict=True))
        return sum(tokens) / seconds
    if is_maximum(name):
        return max(values)
    if name in NORMS:
        return math.hypot(*values)
    if name.startswith(SUMS):
        return sum(values)
    weights = [row.get("train/num_tokens", 0.0) for row in rows]
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(w * value for w, value in zip(weights, values, strict=True)) / total
