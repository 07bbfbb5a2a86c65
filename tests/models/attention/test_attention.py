"""Tests of block-wise attention against all scores at once, and of rotary positions by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models.attention import attention, blockwise
from lightning_jax.models.shape import RopeScaling

attend_blocks = jax.jit(attention.attend_blocks)


def _inputs(rows=2, queries=300, keys=300, heads=4, kv_heads=2, size=8):
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    random = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (rows, length, count, size))
        for key, (length, count) in zip(random, shapes, strict=True)
    ]


def _seen(index, ends):
    key = jnp.arange(ends.shape[1])[None, None, :]
    return (key <= index[:, :, None]) & (index[:, :, None] < ends[:, None, :])


def _packed_ends(length, tree):
    """Return the ends of rows packed with trees of `tree` nodes, with every third node a leaf."""
    node = np.arange(length)
    ends = np.minimum((node // tree + 1) * tree, length)
    return np.where(node % 3 == 2, node + 1, ends)


@jax.jit
def _of_blocks(q, k, v, ends):
    def loss(q, k, v):
        return (attend_blocks(q, k, v, ends) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


@jax.jit
def _of_all_scores(q, k, v, index, ends):
    def loss(q, k, v):
        return (attention.attend_masked(q, k, v, _seen(index, ends)) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("tree", [1, 40, 129, 300])
def test_value_and_gradient_agree_with_all_scores_at_once(tree):
    q, k, v = _inputs()
    index = jnp.broadcast_to(jnp.arange(300), (2, 300))
    ends = jnp.stack((jnp.asarray(_packed_ends(300, tree)), jnp.full(300, 300)))
    ours, our_grads = _of_blocks(q, k, v, ends)
    theirs, grads = _of_all_scores(q, k, v, index, ends)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for a, b in zip(our_grads, grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_queries_that_jump_about_in_a_longer_cache():
    q, k, v = _inputs(rows=1, queries=140, keys=400)
    index = jax.random.randint(jax.random.key(1), (1, 140), 0, 400)
    ends = jnp.full((1, 400), 2**30)
    ours, _ = jax.jit(functools.partial(blockwise.forward, size=128))(q, k, v, index, ends)
    theirs = jax.jit(attention.attend_masked)(q, k, v, _seen(index, ends))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_keys_that_a_query_does_not_see_cannot_change_it():
    q, k, v = _inputs(rows=1)
    ends = jnp.asarray(_packed_ends(300, 100))[None]
    before = attend_blocks(q, k, v, ends)
    after = attend_blocks(q, k.at[:, :100].set(1e4), v.at[:, :100].set(1e4), ends)
    np.testing.assert_array_equal(after[:, 100:], before[:, 100:])


def test_rotation_turns_pairs_by_hand():
    # Head of 4: pairs (0, 2) and (1, 3) rotate by 1 and 1/10 radian per position at theta 100.
    frequencies = attention.rope_frequencies(4, 100.0, None)
    np.testing.assert_allclose(frequencies, [1.0, 0.1], rtol=1e-6)
    tables = attention.rope_tables(jnp.array([[2]]), frequencies)
    out = attention.rotate(jnp.array([[[[1.0, 1.0, 0.0, 0.0]]]]), *tables)
    expected = [math.cos(2), math.cos(0.2), math.sin(2), math.sin(0.2)]
    np.testing.assert_allclose(out[0, 0, 0], expected, rtol=1e-6)


def test_llama3_scaling_by_hand():
    # In 64 positions, frequency 1 makes 10.2 turns (> 4, so it is kept), and 0.01 makes 0.1 turns
    # (< 1, so it is divided by 4). 0.1 makes 1.0186 turns, 0.0062 of the way from 1 to 4, so 0.0062
    # of it is kept and the rest is divided by 4.
    scaling = RopeScaling(4.0, 1.0, 4.0, 64)
    out = attention.rope_frequencies(6, 1000.0, scaling)
    np.testing.assert_allclose(out, [1.0, 0.1 * (0.0062 + 0.9938 / 4), 0.0025], rtol=1e-3)
