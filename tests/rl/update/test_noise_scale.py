"""Tests of the estimate of signal and noise in a step's gradient."""

import dataclasses

import numpy as np
import pytest

from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.update.noise_scale import (
    FEWEST,
    Halves,
    estimate_signal,
    noise_metrics,
    split_halves,
)
from lightning_jax.testing.records import sequence

SHAPE = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)
STEP = [
    dataclasses.replace(
        sequence([1, 10 + k], [9, k, 7], advantage=(-1.0) ** k, weight=0.05), group=k // 2
    )
    for k in range(12)
]


def test_both_parts_are_found_without_bias() -> None:
    """Groups have the gradient (3, 4) and independent noise of squared norm 20 each."""
    random, dims, num_groups, true = np.random.default_rng(0), 20, 16, np.zeros(20)
    true[:2] = 3.0, 4.0
    found = []
    for _ in range(4000):
        gradients = true + random.normal(size=(num_groups, dims))
        # A quarter of them, and all. Their sums have the weights of a step.
        first, whole = gradients[:4].sum(0) / num_groups, gradients.mean(0)
        halves = Halves((), 1, 4.0, num_groups)
        small, large = (float(np.linalg.norm(part)) for part in (first, whole))
        found.append(estimate_signal(small, large, halves, float(num_groups)))
    signal, noise = np.mean(found, axis=0)
    assert signal == pytest.approx(25.0, rel=0.02) and noise == pytest.approx(20.0, rel=0.05)


def test_groups_without_a_gradient_are_groups_too() -> None:
    """Half of 16 groups have no gradient, so the mean is half as large: 6.25 of 25."""
    random, true = np.random.default_rng(1), np.zeros(20)
    true[:2] = 3.0, 4.0
    found = []
    for _ in range(4000):
        gradients = true + random.normal(size=(8, 20))
        sums = gradients[:4].sum(0), gradients.sum(0)
        small, large = (float(np.linalg.norm(part / 16)) for part in sums)
        found.append(estimate_signal(small, large, Halves((), 1, 4.0, 8), 16.0))
    assert np.mean(found, axis=0)[0] == pytest.approx(6.25, rel=0.1)


def test_microbatches_are_halved_by_turns() -> None:
    batches, _ = make_batches(STEP, SHAPE)
    assert len(batches) == 6  # two sequences fit each
    halves = split_halves(batches, STEP)
    assert halves is not None
    assert (halves.order, halves.num_first) == ((0, 2, 4, 1, 3, 5), 3)
    assert halves.num_groups == 6 and 0 < halves.first_groups < 6
    whole = [dataclasses.replace(item, group=0) for item in STEP]
    shared = split_halves(batches, whole)  # one group in both halves
    assert shared is not None and shared.first_groups == pytest.approx(0.5)
    assert split_halves(batches[:1], STEP) is None
    assert split_halves(batches, [dataclasses.replace(item, group=None) for item in STEP]) is None


def test_the_scale_is_that_of_the_newest_steps() -> None:
    row = {"train/grad_signal": 1.0, "train/grad_noise": 90.0, "train/grad_square": 12.25}
    lone: list[dict[str, float]] = [row] * (FEWEST - 1)
    assert noise_metrics(lone) == {}
    found = noise_metrics([*lone, {"eval/reward_mean": 1.0}, row])
    assert found == {
        "train/noise_scale": pytest.approx(90.0),
        "train/signal_share": pytest.approx(1 / 12.25),
    }
    lost = [row | {"train/grad_signal": -1.0}] * FEWEST
    assert noise_metrics(lost) == {"train/signal_share": 0.0}
