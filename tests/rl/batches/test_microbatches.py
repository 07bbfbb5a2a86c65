"""Tests of bundled microbatches and their padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.rl.batches import microbatches
from lightning_jax.rl.batches.batch import MaskBatch
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.batches.microbatches import (
    BUNDLE_ON,
    bundles,
    cut_pairs,
    fold_bundle,
    map_bundle,
    measure,
    pair_sizes,
    place_batches,
    values_by_call,
)
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.gae import state_sequences
from lightning_jax.rl.sequence import LikelyTokens, TeacherScores
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


def test_an_accelerators_rows_have_three_numbers_of_pairs():
    def sizes(platform: str, **shape: int) -> tuple[int, ...]:
        return pair_sizes(BatchConfig(**shape), platform)

    assert sizes("cuda", max_targets=2048, head_chunk=256) == (512, 1024, 2048)
    # Of 10 chunks a quarter is 3.
    assert sizes("tpu", max_targets=40, head_chunk=4) == (12, 20, 40)
    assert sizes("cuda", max_targets=8, head_chunk=4) == (4, 8)
    assert sizes("cuda", max_targets=4, head_chunk=4) == (4,)
    assert sizes("cpu", max_targets=2048, head_chunk=256) == (2048,)  # skips chunks itself


def test_batches_get_the_least_size_that_holds_their_pairs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(microbatches, "pair_sizes", lambda *_: (4, 8, 16))
    shape = BatchConfig(rows=2, row_len=64, max_targets=16, head_chunk=4)
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    for number, size in ((1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)):
        (batch,), _ = make_batches([sequence([9], list(range(1, number + 1)))], shape)
        (found,) = place_batches([batch], shape, mesh)
        assert found.distinct.ids.shape == found.distinct.nodes.shape == (2, size)
        assert found.target_ids.shape == found.distinct.of_targets.shape == (2, 16)
        assert (found.distinct.ids >= 0).sum() == number
        np.testing.assert_array_equal(found.distinct.ids, batch.distinct.ids[:, :size])


def test_a_teachers_tokens_and_masks_are_cut_with_their_pairs():
    top = LikelyTokens(np.ones((2, 3), np.int32), np.zeros((2, 3), np.float32))
    call = dataclasses.replace(
        sequence([1], [2, 3]), temperature=0.5, teacher_scores=TeacherScores((0.0, 0.0), top)
    )
    (batch,), _ = make_batches([call], SHAPE)
    masks = MaskBatch(np.zeros((1, 2, 5), np.uint8), np.zeros((1, 8), np.int32))
    masked = dataclasses.replace(batch.distinct, masks=masks)
    cut = cut_pairs(dataclasses.replace(batch, distinct=masked), 2)
    assert cut.distinct.temperatures.shape == cut.distinct.masks.of_pairs.shape == (1, 2)
    assert cut.distinct.masks.table.shape == (1, 2, 5)
    assert cut.teacher.top.ids.shape == cut.teacher.top.logprobs.shape == (1, 2, 3)
    assert cut.teacher.logprobs.shape == (1, 8)


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
