"""Separate updates of policies with their own weights, and their joint metrics.

Losses are sums over tokens, so the gradient of one policy's weights comes only from its own calls,
even with joint credit. Policies are therefore updated one after the other, with the gradients of
only one in memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_jax.rl.batch import TrainingSequence
from lightning_jax.rl.gae import CallValues
from lightning_jax.rl.losses.policy import is_maximum
from lightning_jax.types import Metrics, Trajectory

NORMS = ("train/grad_norm", "train/value_grad_norm")
RATES = {
    "train/tokens_per_s": "train/tokens_naive",
    "train/forest_tokens_per_s": "train/tokens_forest",
}
SUMS = (
    "time/", "train/loss", "train/value_loss", "train/value_clip_fraction", "train/num_",
    "train/tokens_", "train/dropped_", "train/skipped_updates"
)  # fmt: skip


def keep_policy_sequences(
    sequences: Sequence[TrainingSequence], index: int
) -> list[TrainingSequence]:
    """Return the sequences of the policy at `index`, marked for a learner of one policy."""
    return [replace(sequence, adapter=None) for sequence in sequences if sequence.adapter == index]


def join_values(
    trajectories: Sequence[Trajectory],
    by_policy: Mapping[str, Sequence[Sequence[CallValues]]],
) -> list[tuple[CallValues, ...]]:
    """Merge the values from each policy's critic, of its own calls, into those of all calls."""
    joined = []
    for index, trajectory in enumerate(trajectories):
        rest = {name: iter(values[index]) for name, values in by_policy.items()}
        joined.append(tuple(next(rest[call.answered_by]) for call in trajectory.transitions))
    return joined


def join_metrics(rows: Mapping[str, Metrics]) -> Metrics:
    """Merge the metrics of each policy's update into one row, of at least one policy.

    Each policy's own metrics are added as `train/entropy/policy=writer`. Counts, losses and seconds
    are summed, maxima stay maxima, norms are those of all gradients together, and the rest are
    means over trained tokens. `train/skipped_updates` is 1 if no policy learned; otherwise policies
    that had nothing to learn from do not count.
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
    weights = [row.get("train/num_tokens", 0.0) for row in rows]
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(w * value for w, value in zip(weights, values, strict=True)) / total
