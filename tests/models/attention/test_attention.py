"""Tests of block-wise attention against all scores at once, and of rotary positions by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_trees import depths_of, random_ends

from lightning_jax.models.attention import attention, blockwise
from lightning_jax.models.attention.blockwise import Window
from lightning_jax.models.shape import LinearScaling, RopeScaling

attend_blocks = jax.jit(attention.attend_blocks)


def _inputs(rows=2, queries=300, keys=300, heads=4, kv_heads=2, size=8):
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    random = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (rows, length, count, size))
        for key, (length, count) in zip(random, shapes, strict=True)
    ]


def _seen(index, ends, depths=None, window=0):
    key = jnp.arange(ends.shape[1])[None, None, :]
    seen = (key <= index[:, :, None]) & (index[:, :, None] < ends[:, None, :])
    return seen if depths is None else seen & (depths[:, :, None] - depths[:, None, :] < window)


def _packed_ends(length, tree):
    """Return the ends of rows packed with trees of `tree` nodes, with every third node a leaf."""
    node = np.arange(length)
    ends = np.minimum((node // tree + 1) * tree, length)
    return np.where(node % 3 == 2, node + 1, ends)


@jax.jit
def _of_blocks(q, k, v, ends, window=None):
    def loss(q, k, v):
        return (attend_blocks(q, k, v, ends, window) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


@jax.jit
def _of_all_scores(q, k, v, index, ends, depths=None, window=0):
    def loss(q, k, v):
        seen = _seen(index, ends, depths, window)
        return (attention.attend_masked(q, k, v, seen) ** 2).sum()

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


def _random_rows(length=300):
    """Return ends and depths [2, T] of random trees, some deeper than 200 nodes."""
    ends = np.stack([random_ends(length, 5, 0.95), random_ends(length, 6, 0.999)])
    return jnp.asarray(ends), jnp.asarray(np.stack([depths_of(row) for row in ends]))


@pytest.mark.parametrize("window", [1, 30, 140, 300])
def test_window_by_depth_agrees_with_all_scores_at_once(window):
    q, k, v = _inputs()
    index = jnp.broadcast_to(jnp.arange(300), (2, 300))
    ends, depths = _random_rows()
    assert depths.max() > 200
    ours, our_grads = _of_blocks(q, k, v, ends, Window.of(depths, window))
    theirs, grads = _of_all_scores(q, k, v, index, ends, depths, window)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for a, b in zip(our_grads, grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_window_as_long_as_the_row_changes_no_value_and_no_gradient():
    ends, depths = _random_rows()
    ours, theirs = (_of_blocks(*_inputs(), ends, w) for w in (Window.of(depths, 300), None))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("copies", [1, 30])  # 6 nodes, and 180, which are blocks
def test_window_of_two_nodes_by_hand(copies):
    # A trunk of three nodes has branches of two nodes and of one. Equal keys give each node the
    # mean of the values that it sees: its own and its parent's.
    ends = jnp.asarray([np.ravel([np.array([6, 6, 6, 5, 5, 6]) + 6 * i for i in range(copies)])])
    depths = jnp.asarray([[0, 1, 2, 3, 4, 3] * copies])
    values = jnp.asarray([1.0, 2.0, 4.0, 8.0, 16.0, 32.0] * copies)[None, :, None, None]
    zeros = jnp.zeros((1, 6 * copies, 1, 2))
    values = jnp.broadcast_to(values, zeros.shape)
    out = attention.attend_tree(zeros, zeros, values, ends, Window.of(depths, 2))
    expected = [1.0, 1.5, 3.0, 6.0, 12.0, 18.0] * copies
    np.testing.assert_allclose(out[0, :, 0, 0], expected, rtol=1e-6)


def test_queries_that_jump_about_in_a_longer_cache():
    q, k, v = _inputs(rows=1, queries=140, keys=400)
    index = jax.random.randint(jax.random.key(1), (1, 140), 0, 400)
    ends = jnp.full((1, 400), 2**30)
    ours, _ = jax.jit(functools.partial(blockwise.forward, size=128))(q, k, v, index, ends, None)
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


def test_linear_scaling_divides_all_frequencies():
    out = attention.rope_frequencies(4, 100.0, LinearScaling(8.0))
    np.testing.assert_allclose(out, [1 / 8, 1 / 80], rtol=1e-6)


def test_llama3_scaling_by_hand():
    # In 64 positions, frequency 1 makes 10.2 turns (> 4, so it is kept), and 0.01 makes 0.1 turns
    # (< 1, so it is divided by 4). 0.1 makes 1.0186 turns, 0.0062 of the way from 1 to 4, so 0.0062
    # of it is kept and the rest is divided by 4.
    scaling = RopeScaling(4.0, 1.0, 4.0, 64)
    out = attention.rope_frequencies(6, 1000.0, scaling)
    np.testing.assert_allclose(out, [1.0, 0.1 * (0.0062 + 0.9938 / 4), 0.0025], rtol=1e-3)
