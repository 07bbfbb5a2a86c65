"""Tests of bundled microbatches and their padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.batches.microbatches import (
    BUNDLE_ON,
    bundles,
    fold_bundle,
    map_bundle,
    measure,
    values_by_call,
)
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.gae import state_sequences
from lightning_jax.testing.records import sequence, trajectory, transition

BUNDLE = BUNDLE_ON["cpu"]
SHAPE = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)
TWO_ROWS = BatchConfig(rows=2, row_len=16, max_targets=4, head_chunk=4)


def batches(number: int):
    """Build microbatches of one row each, with advantage k in the k-th."""
    (batch,), _ = make_batches([sequence([1, 2], [3, 4], advantage=1.0)], SHAPE)
    return [dataclasses.replace(batch, advantages=k * batch.advantages) for k in range(number)]


def test_any_number_of_microbatches_makes_bundles_of_one_size():
    for number, counts in ((1, [1]), (BUNDLE, [BUNDLE]), (2 * BUNDLE + 1, [BUNDLE, BUNDLE, 1])):
        made = bundles(batches(number))
        assert [int(count) for _, count in made] == counts
        assert {len(bundle) for bundle, _ in made} == {BUNDLE}
    assert bundles([]) == []


def test_accelerators_take_microbatches_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(BUNDLE_ON, "cpu")
    assert [len(bundle) for bundle, _ in bundles(batches(3))] == [1, 1, 1]
    run = jax.jit(map_bundle(lambda batch, factor: factor * (1.0 + batch.advantages)))
    measured = measure(run, batches(3), 2.0)
    assert [float(found[0, 0]) for found in measured] == [2.0, 4.0, 6.0]
    assert run._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_program_takes_those_that_count_in_their_order():
    def add(carry, batch, index):
        return carry + jnp.stack([batch.advantages.sum(), index.astype(jnp.float32)])

    found = jax.jit(fold_bundle, static_argnums=2)(*bundles(batches(3))[0], add, jnp.zeros(2))
    # Two targets per microbatch with advantages 0, 1 and 2 sum to 6. Indices 0, 1 and 2 sum to 3.
    np.testing.assert_array_equal(found, [6.0, 3.0])


def test_each_is_measured_and_padding_is_not():
    run = jax.jit(map_bundle(lambda batch, factor: factor * (1.0 + batch.advantages)))
    whole = run(*bundles(batches(3))[0], 2.0)
    assert len(whole) == BUNDLE and not np.any(whole[3:])
    measured = measure(run, batches(3), 2.0)
    assert len(measured) == 3
    for k, found in enumerate(measured):
        np.testing.assert_array_equal(found[0, :3], [2.0 + 2.0 * k, 2.0 + 2.0 * k, 2.0])
    assert measure(run, [], 2.0) == []


def test_values_find_their_calls():
    rollouts = [
        trajectory(transition([9, 9], [1, 2]), transition([1], [4]), rollout="A"),
        trajectory(rollout="B"),
        trajectory(transition([5] * 17, [1]), transition([3], [1, 2, 3]), rollout="C"),
    ]
    sequences = state_sequences(rollouts, per_token=True)
    batches, stats = make_batches(sequences, TWO_ROWS)
    assert stats["train/dropped_too_long"] == 1
    measured = [
        np.where(batch.target_mask, 10.0 * batch.target_calls + batch.target_ids, 0.0)
        for batch in batches
    ]
    assert values_by_call(rollouts, batches, measured) == [
        ((1.0, 2.0), (14.0,)),
        (),
        (None, (31.0, 32.0, 33.0)),
    ]
