"""The cache in segments: its shape, what writing touches, attention against all scores at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models import attention
from lightning_jax.models.cache import (
    KVCache,
    attend_cache,
    join,
    make_cache,
    segment_lengths,
    segment_starts,
    write_cache,
)

attend = jax.jit(attend_cache)
attend_all = jax.jit(attention.attend_masked)


def _empty(rows: int, length: int) -> KVCache:
    return make_cache(layers=2, rows=rows, length=length, kv_heads=2, head_dim=8, dtype=jnp.float32)


@partial(jax.jit, static_argnums=(0, 1))
def _filled(rows: int, length: int) -> tuple[KVCache, jax.Array, jax.Array]:
    """A cache written in one go, and the keys and values [B, T, K, D] in it."""
    random = jax.random.split(jax.random.key(0), 2)
    keys, values = (jax.random.normal(key, (rows, length, 2, 8)) for key in random)
    empty = _empty(rows, length)
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    layer = write_cache(empty.keys[0], empty.values[0], keys, values, positions)
    return KVCache((layer[0],), (layer[1],)), keys, values


def test_segments_grow_with_what_comes_before_them():
    assert segment_lengths(1600) == (256, 256, 256, 256, 512, 64)
    assert segment_lengths(16) == (16,) and segment_lengths(300) == (256, 44)
    cache = _empty(3, 300)
    assert cache.length == 300 and segment_starts(cache.values[0]) == [0, 256]
    assert [leaf.shape for leaf in cache.keys[1]] == [(3, 2, 8, 256), (3, 2, 8, 44)]
    assert [leaf.shape for leaf in cache.values[1]] == [(3, 2, 256, 8), (3, 2, 44, 8)]


def test_join_puts_together_what_split_took_apart():
    cache, _, _ = _filled(2, 300)
    parts = cache.split()
    assert [part.length for part in parts] == [256, 44]
    jax.tree.map(np.testing.assert_array_equal, join(parts), cache)


def test_writing_touches_its_positions_and_nothing_else():
    cache, _, _ = _filled(3, 600)
    new = jnp.full((2, 2, 2, 8), 7.0)
    positions = jnp.array([[255, 256], [-1, 600]])  # across a border; outside on both sides
    keys, values = write_cache(cache.keys[0], cache.values[0], new, -new, positions)
    joined = np.concatenate(keys, axis=3), np.concatenate(values, axis=2)
    before = np.concatenate(cache.keys[0], axis=3), np.concatenate(cache.values[0], axis=2)
    changed = (joined[0] != before[0]).any(axis=(1, 2)), (joined[1] != before[1]).any(axis=(1, 3))
    for which in changed:
        assert np.argwhere(which).tolist() == [[0, 255], [0, 256]]
    assert (joined[0][0, :, :, 255] == 7).all() and (joined[1][0, :, 256] == -7).all()


def test_a_single_visible_key_gives_its_value():
    cache, _, values = _filled(2, 5)
    queries = jax.random.normal(jax.random.key(1), (2, 1, 4, 8))
    out = attend(queries, cache.keys[0], cache.values[0], jnp.array([[0], [0]]))
    np.testing.assert_allclose(out[0, 0, :2], jnp.stack([values[0, 0, 0]] * 2), rtol=1e-5)
    np.testing.assert_allclose(out[0, 0, 2:], jnp.stack([values[0, 0, 1]] * 2), rtol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 40])
@pytest.mark.parametrize("last", [30, 255, 256, 299, 699])
def test_attention_agrees_with_all_scores_at_once(num_queries: int, last: int):
    cache, keys, values = _filled(2, 700)
    queries = jax.random.normal(jax.random.key(1), (2, num_queries, 4, 8))
    positions = jnp.maximum(jnp.array([[last], [3]]) - jnp.arange(num_queries)[None, ::-1], 0)
    out = attend(queries, cache.keys[0], cache.values[0], positions)
    seen = jnp.arange(700)[None, None, :] <= positions[:, :, None]
    expected = attend_all(queries, keys, values, seen)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_fewer_rows_and_fewer_segments_change_nothing_and_padding_is_finite():
    cache, _, _ = _filled(3, 700)
    queries = jax.random.normal(jax.random.key(1), (3, 1, 4, 8))
    positions = jnp.array([[200], [100], [700]])  # the last one is padding
    out = attend(queries, cache.keys[0], cache.values[0], positions)
    assert np.isfinite(out).all()
    first = join(cache.split()[:1])
    less = attend(queries[:2], first.keys[0], first.values[0], positions[:2])
    np.testing.assert_allclose(less, out[:2], atol=1e-6)
