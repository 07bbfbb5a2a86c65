"""Joining of what the updates of a step found, and of policies with their own weights.

Losses are sums over tokens, so the gradient of one policy's weights comes only from its own calls,
even with joint credit. Policies are therefore updated one after the other, with the gradients of
only one in memory.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace

from lightning_jax.models.policies import ALL, Policy
from lightning_jax.rl.gae import CallValues
from lightning_jax.rl.losses.policy import NUM_TOKENS, is_maximum, tokens_metric
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.flops import MFU
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


def sequences_of(policy: Policy, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Return the policy's sequences. Those of one policy are marked for a learner of one."""
    if policy == ALL:
        return list(sequences)
    return [replace(item, adapter=None) for item in sequences if item.adapter == policy.index]


def join_values(
    trajectories: Sequence[Trajectory],
    policies: Sequence[Policy],
    values: Sequence[Sequence[tuple[CallValues, ...]]],
) -> list[tuple[CallValues, ...]]:
    """Merge the values that each policy's critic found of its calls into those of all calls."""
    if policies[0] == ALL:
        return list(values[0])
    joined = []
    for trajectory, *parts in zip(trajectories, *values, strict=True):
        rest = {policy.name: iter(part) for policy, part in zip(policies, parts, strict=True)}
        joined.append(tuple(next(rest[call.answered_by]) for call in trajectory.transitions))
    return joined


def join_metrics(policies: Sequence[Policy], rows: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of the update of each policy's weights into one row.

    The row of `ALL` stays as it is. Otherwise each policy's own metrics are added as
    `train/entropy/policy=writer`. Counts, losses and seconds are summed, maxima stay maxima, norms
    are those of all gradients together, and the rest are means over trained tokens.
    `train/skipped_updates` is 1 if no policy learned; otherwise policies that had nothing to learn
    from do not count.
    """
    if policies[0] == ALL:
        return rows[0]
    names = dict.fromkeys(name for row in rows for name in row)
    joined = {name: _join(name, [row for row in rows if name in row]) for name in names}
    learned = [row["train/skipped_updates"] for row in rows if row["train/num_updates"]]
    joined["train/skipped_updates"] = sum(learned) if learned else 1.0
    for policy, row in zip(policies, rows, strict=True):
        of_training = {name: value for name, value in row.items() if name.startswith("train/")}
        joined |= {f"{name}{policy.suffix}": value for name, value in of_training.items()}
    return joined


def _join(name: str, rows: Sequence[Metrics]) -> float:
    """Merge the values that the rows have under `name`."""
    values = [row[name] for row in rows]
    if name in RATES:  # the updates ran one after the other
        tokens = [row[RATES[name]] for row in rows]
        seconds = sum(n / value for n, value in zip(tokens, values, strict=True))
        return sum(tokens) / seconds
    if name == MFU:  # of one peak
        times = [row["train/tokens_forest"] / row["train/forest_tokens_per_s"] for row in rows]
        return sum(map(operator.mul, times, values)) / sum(times)
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


def merge_updates(updates: Sequence[Metrics]) -> Metrics:
    """Return one row of metrics for the updates of a step, of which there is at least one.

    Counts are added, maxima stay maxima, and the rest are means, which tokens weigh if they are of
    responses of one length. The sampler-trainer gap is that of the first update, whose weights did
    the sampling.
    """
    row = {"train/num_updates": float(len(updates))}
    for name in dict.fromkeys(name for update in updates for name in update):
        having = [update for update in updates if name in update]
        values = [update[name] for update in having]
        if name == "train/mismatch_kl":
            row[name] = values[0]
        elif is_maximum(name):
            row[name] = max(values)
        elif name.startswith(("train/skipped_updates", NUM_TOKENS)):
            row[name] = sum(values)
        else:
            over = tokens_metric(name)
            weights = [1.0 if over == NUM_TOKENS else update[over] for update in having]
            row[name] = sum(map(operator.mul, weights, values)) / sum(weights)
    return row


def merge_packing(parts: Sequence[Metrics]) -> Metrics:
    """Return the packing metrics of a step from those of its parts.

    Parts have about the same size, so shares are averaged.
    """
    return {
        name: sum(part[name] for part in parts) / (len(parts) if name.endswith("_share") else 1)
        for name in parts[0]
    }
