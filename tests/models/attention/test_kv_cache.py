"""Tests of the cache in each platform's layout: writes, and attention against all scores at once.

They run on a CPU, so without the kernels of tests/models/attention/test_flash_cache.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models.attention import attention
from lightning_jax.models.attention.flash_cache import kernel_width
from lightning_jax.models.attention.kv_cache import (
    KVCache,
    LayerCache,
    attend_cache,
    init_cache,
    join_caches,
    row_length,
    segment_lengths,
    segment_starts,
    write_cache,
)
from lightning_jax.models.shape import Attention, Block, DecoderShape, Dense

SHAPE = DecoderShape(vocab_size=8, embed_dim=16, blocks=2 * (Block(Attention(2, 2, 8), Dense(16)),))
attend = jax.jit(attend_cache, static_argnames="window")
attend_all = jax.jit(attention.attend_masked)


PLATFORMS = pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])


def _empty(rows: int, length: int, platform: str = "cpu") -> KVCache:
    return init_cache(SHAPE, rows, length, platform=platform)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _filled(rows: int, length: int, platform: str = "cpu") -> tuple[KVCache, jax.Array, jax.Array]:
    """Return a cache of one layer, filled in one write, and its keys and values [B, T, K, D]."""
    random = jax.random.split(jax.random.key(0), 2)
    keys, values = (jax.random.normal(key, (rows, length, 2, 8)) for key in random)
    empty = init_cache(replace(SHAPE, blocks=SHAPE.blocks[:1]), rows, length, platform=platform)
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    return KVCache((write_cache(empty.layers[0], keys, values, positions),)), keys, values


def _by_token(layer: LayerCache) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values, each [S, C, K, D]."""
    keys = np.moveaxis(np.concatenate(layer.keys, axis=layer.key_axis), layer.key_axis, 1)
    return keys, np.moveaxis(np.concatenate(layer.values, axis=2), 2, 1)


def test_segments_grow_with_what_comes_before_them():
    assert segment_lengths(1600) == (256, 256, 256, 256, 512, 64)
    assert segment_lengths(16) == (16,) and segment_lengths(300) == (256, 44)
    cache = _empty(3, 300)
    assert cache.length == 300 and segment_starts(cache.layers[0].values) == [0, 256]
    assert [leaf.shape for leaf in cache.layers[1].keys] == [(3, 2, 8, 256), (3, 2, 8, 44)]
    assert [leaf.shape for leaf in cache.layers[1].values] == [(3, 2, 256, 8), (3, 2, 44, 8)]


def test_a_kernel_reads_a_row_in_one_piece_and_as_wide_as_it_wants() -> None:
    shapes = {"gpu": (6, 2, 300, 16), "tpu": (6, 2, 300, 128)}  # three rows of two layers
    for platform, shape in shapes.items():
        cache = _empty(3, 300, platform)
        assert {leaf.shape for leaf in jax.tree.leaves(cache)} == {shape} and cache.length == 300
        assert len(jax.tree.leaves(cache)) == 2 and len(cache.split()) == 1
    assert [kernel_width("gpu", width) for width in (8, 64, 80, 128)] == [16, 64, 128, 128]
    assert [kernel_width("tpu", width) for width in (64, 128, 192)] == [128, 128, 256]
    assert [row_length(600, platform) for platform in ("cpu", "gpu", "tpu")] == [600, 640, 640]


def test_rows_of_a_layer_are_after_those_of_the_layers_before():
    cache = _empty(3, 300, "gpu")
    assert (cache.stacked, cache.num_rows) == (2, 3)
    assert np.asarray(cache.rows_of(1, None, 2)).tolist() == [3, 4]
    assert np.asarray(cache.rows_of(1, jnp.array([2, 0]), 2)).tolist() == [5, 3]
    assert np.asarray(cache.rows_of(0, jnp.array([2, 0]), 2)).tolist() == [2, 0]
    other = _empty(3, 300)
    assert (other.stacked, other.num_rows, other.rows_of(1, None, 2)) == (1, 3, None)


def test_join_reverses_split():
    cache, _, _ = _filled(2, 300)
    parts = cache.split()
    assert [part.length for part in parts] == [256, 44]
    jax.tree.map(np.testing.assert_array_equal, join_caches(parts), cache)


@PLATFORMS
def test_writing_touches_its_positions_and_nothing_else(platform: str):
    cache, keys, values = _filled(3, 600, platform)
    before = _by_token(cache.layers[0])
    for ours, theirs in zip(before, (keys, values), strict=True):
        np.testing.assert_array_equal(ours[..., :8], theirs)
    new = jnp.full((2, 2, 2, 8), 7.0)
    positions = jnp.array([[255, 256], [-1, 600]])  # across a border; outside on both sides
    after = _by_token(write_cache(cache.layers[0], new, -new, positions))
    for side, number in zip((0, 1), (7, -7), strict=True):
        changed = (after[side] != before[side]).any(axis=(2, 3))
        assert np.argwhere(changed).tolist() == [[0, 255], [0, 256]]
        assert (after[side][0, 255:257, :, :8] == number).all()


@PLATFORMS
def test_a_single_visible_key_gives_its_value(platform: str):
    cache, _, values = _filled(2, 5, platform)
    queries = jax.random.normal(jax.random.key(1), (2, 1, 4, 8))
    out = attend(queries, cache.layers[0], jnp.array([[0], [0]]))
    np.testing.assert_allclose(out[0, 0, :2], jnp.stack([values[0, 0, 0]] * 2), rtol=1e-5)
    np.testing.assert_allclose(out[0, 0, 2:], jnp.stack([values[0, 0, 1]] * 2), rtol=1e-5)


@PLATFORMS
@pytest.mark.parametrize("num_queries", [1, 40])
@pytest.mark.parametrize("last", [30, 255, 256, 299, 699])
def test_attention_agrees_with_all_scores_at_once(num_queries: int, last: int, platform: str):
    cache, keys, values = _filled(2, 700, platform)
    queries = jax.random.normal(jax.random.key(1), (2, num_queries, 4, 8))
    positions = jnp.maximum(jnp.array([[last], [3]]) - jnp.arange(num_queries)[None, ::-1], 0)
    out = attend(queries, cache.layers[0], positions)
    seen = jnp.arange(700)[None, None, :] <= positions[:, :, None]
    expected = attend_all(queries, keys, values, seen)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@PLATFORMS
@pytest.mark.parametrize("num_queries", [1, 40])
@pytest.mark.parametrize("window", [1, 20, 300])
def test_window_agrees_with_all_scores_at_once(num_queries: int, window: int, platform: str):
    cache, keys, values = _filled(2, 700, platform)
    queries = jax.random.normal(jax.random.key(1), (2, num_queries, 4, 8))
    positions = jnp.maximum(jnp.array([[580], [3]]) - jnp.arange(num_queries)[None, ::-1], 0)
    out = attend(queries, cache.layers[0], positions, window=window)
    token = jnp.arange(700)[None, None, :]
    index = positions[:, :, None]
    expected = attend_all(queries, keys, values, (token <= index) & (token > index - window))
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("rows", [None, jnp.array([1, 0])])
def test_segments_before_the_window_are_not_read(rows: jax.Array | None):
    """Check with NaN, because NaN times a weight of 0 is NaN, too."""
    cache, _, _ = _filled(2, 700)
    layer = cache.layers[0]  # in segments of 256, 256 and 188 tokens
    layer = replace(layer, values=(layer.values[0] * jnp.nan, *layer.values[1:]))
    queries = jax.random.normal(jax.random.key(1), (2, 1, 4, 8))
    positions = jnp.array([[600], [350]])
    assert np.isfinite(attend(queries, layer, positions, rows, window=90)).all()
    assert np.isnan(attend(queries, layer, positions, rows, window=100)[1]).all()


def test_fewer_rows_and_fewer_segments_change_nothing_and_padding_is_finite():
    cache, _, _ = _filled(3, 700)
    queries = jax.random.normal(jax.random.key(1), (3, 1, 4, 8))
    positions = jnp.array([[200], [100], [700]])  # the last one is padding
    out = attend(queries, cache.layers[0], positions)
    assert np.isfinite(out).all()
    first = join_caches(cache.split()[:1])
    less = attend(queries[:2], first.layers[0], positions[:2])
    np.testing.assert_allclose(less, out[:2], atol=1e-6)
