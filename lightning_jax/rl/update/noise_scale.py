"""Share of a step's gradient that is signal, from its norm over half and over all of the groups.

The gradient of n groups is the true gradient plus noise whose squared norm falls as 1 / n. Its norm
at two sizes gives both parts (McCandlish et al. 2018, arXiv 1812.06162, appendix A). The noise
scale is the number of groups at which both are equal. With many fewer a step mostly follows noise.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.sequence import TrainingSequence

WINDOW = 20  # newest estimates that are averaged, because a single one is mostly noise
FEWEST = 4  # estimates without which nothing is said


@dataclass(frozen=True)
class Halves:
    """Order of microbatches in which the first `num_first` have about half of the groups."""

    order: tuple[int, ...]
    num_first: int
    first_groups: float  # a group in both halves counts with the share of its targets
    num_groups: int


def split_halves(batches: Sequence[Batch], sequences: Sequence[TrainingSequence]) -> Halves | None:
    """Split the microbatches of packed sequences, or return None if that is impossible.

    It needs two microbatches and the group of each sequence. Every second microbatch goes to the
    first half, because they are sorted by size.
    """
    groups = [sequence.group for sequence in sequences]
    if len(batches) < 2 or any(group is None for group in groups):
        return None
    order = (*range(0, len(batches), 2), *range(1, len(batches), 2))
    num_first = (len(batches) + 1) // 2
    of_halves = [Counter[int | None](), Counter[int | None]()]
    for place, index in enumerate(order):
        mask = np.asarray(batches[index].target_mask)
        calls = np.asarray(batches[index].target_calls)[mask].tolist()
        of_halves[place >= num_first].update(groups[call] for call in calls)
    first, second = of_halves
    present = first.keys() | second.keys()
    first_groups = sum(first[group] / (first[group] + second[group]) for group in present)
    if not 0 < first_groups < len(present):
        return None
    return Halves(order, num_first, first_groups, len(present))


def estimate_signal(
    first_norm: float, norm: float, halves: Halves, num_groups: float
) -> tuple[float, float]:
    """Return unbiased estimates of (squared true gradient, noise of one group).

    `first_norm` is that of the first half's summed gradient, `norm` that of all microbatches, whose
    weights are those of `num_groups` groups. Groups without a gradient are in none. Both estimates
    can be negative.
    """
    share = halves.first_groups / halves.num_groups
    small, large = (first_norm / share) ** 2, norm**2
    noise = (small - large) / (1 / (share * num_groups) - 1 / num_groups)
    return large - noise / num_groups, noise


def noise_metrics(rows: Sequence[Mapping[str, float | int]]) -> dict[str, float]:
    """Return the noise scale and the share of signal over the newest rows, oldest first.

    Empty without enough estimates. There is no noise scale while no signal is seen.
    """
    measured = [row for row in rows if "train/grad_signal" in row][-WINDOW:]
    if len(measured) < FEWEST:
        return {}
    signal = sum(row["train/grad_signal"] for row in measured)
    noise = sum(row["train/grad_noise"] for row in measured)
    whole = sum(row["train/grad_square"] for row in measured)
    share = min(max(signal / whole, 0.0), 1.0) if whole > 0 else 0.0
    metrics = {"train/signal_share": share}
    return metrics | ({"train/noise_scale": max(noise, 0.0) / signal} if signal > 0 else {})
