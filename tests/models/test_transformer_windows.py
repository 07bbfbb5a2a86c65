"""Tests of models whose layers see windows: forests, the cache, packing and several devices.

Most layers of the model see few tokens and some see all, in a pattern that repeats.
"""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_trees import depths_of, random_ends

from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.config import MeshConfig, RematKind
from lightning_jax.models.mesh import batch_sharding, make_mesh
from lightning_jax.models.shape import Attention, Block, DecoderConfig, DecoderShape, Dense, Experts
from lightning_jax.models.sharding import make_gather, param_shardings
from lightning_jax.models.transformer import (
    can_stack,
    forward,
    forward_routes,
    init_params,
    stack_layers,
    unembed,
)
from lightning_jax.testing.tiny import with_mixers

WINDOW = 7
LOCAL, WHOLE = (Block(Attention(4, 2, 8, window=size), Dense(40)) for size in (WINDOW, None))
MIXED = DecoderConfig(DecoderShape(64, 32, (LOCAL, LOCAL, WHOLE, LOCAL, LOCAL)))
ALL_LOCAL = DecoderConfig(DecoderShape(64, 32, (LOCAL, LOCAL)))
LENGTH = 170  # more than one block, and not a multiple of a block
run = jax.jit(forward, static_argnums=1, static_argnames="remat")


def _params(config: DecoderConfig):
    params = init_params(config, jax.random.key(0))
    return jax.tree.map(lambda leaf: 8 * leaf if leaf.ndim > 1 else leaf, params)


PARAMS = _params(MIXED)


def _tokens(rows: int, length: int, seed: int = 1):
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, 64)


def _depths(rows: int, length: int):
    return jnp.broadcast_to(jnp.arange(length), (rows, length))


@partial(jax.jit, static_argnames=("config", "remat", "gather"))
def _read(params, config, tokens, positions, ends, weights, remat: RematKind = "none", gather=None):
    """Return the hidden states, and the gradient of a loss that weighs each node."""

    def loss(params):
        hidden, _ = forward(
            params, config, tokens, positions, ends=ends, remat=remat, gather=gather
        )
        scores = jax.nn.logsumexp(unembed(params, config, hidden), axis=-1)
        return (weights * scores).sum(), hidden

    (_, hidden), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return hidden, grads


def assert_close(ours, theirs) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("trunk", [20, 80])  # without and with blocks
@pytest.mark.parametrize("remat", ["none", "attention"])
def test_forest_has_values_and_gradients_of_separate_rows(trunk: int, remat: RematKind):
    """Trunk and branches are longer than the window. Each row weighs the trunk by half."""
    size = trunk - 3
    node = np.arange(trunk + 2 * size)
    is_right = node >= trunk + size
    positions = jnp.asarray(np.where(is_right, node - size, node))[None]
    ends = np.where((node >= trunk) & ~is_right, trunk + size, len(node))
    tokens, weights = _tokens(1, len(node)), jax.random.normal(jax.random.key(2), (1, len(node)))
    forest = _read(PARAMS, MIXED, tokens, positions, jnp.asarray(ends)[None], weights, remat=remat)
    paths = [np.arange(trunk + size), np.append(np.arange(trunk), node[is_right])]
    rows = jnp.concatenate([tokens[:, path] for path in paths])
    share = np.where(np.arange(trunk + size) < trunk, 0.5, 1.0)[None]
    row_weights = jnp.concatenate([weights[:, path] for path in paths]) * share
    separate = _read(PARAMS, MIXED, rows, _depths(2, trunk + size), None, row_weights)
    for row, path in enumerate(paths):
        np.testing.assert_allclose(forest[0][0, path], separate[0][row], atol=2e-5)
    assert_close(forest[1], separate[1])
    limitless = with_mixers(MIXED, window=None)
    unlike, _ = run(PARAMS, limitless, rows, _depths(2, trunk + size))
    assert np.abs(unlike - separate[0]).max() > 0.01


@pytest.mark.parametrize("length", [30, LENGTH])
def test_token_reaches_as_far_as_the_windows_of_all_layers_together(length: int):
    """Two layers with windows of 7 carry a token 12 nodes down its path, and no further."""
    params, tokens = _params(ALL_LOCAL), _tokens(1, length)
    changed = tokens.at[0, 5].add(1)
    states = [run(params, ALL_LOCAL, row, _depths(1, length))[0] for row in (tokens, changed)]
    differs = np.abs(states[0] - states[1]).max(axis=2)[0] > 0
    assert np.flatnonzero(differs).tolist() == list(range(5, 5 + 2 * (WINDOW - 1) + 1))


def test_packing_changes_nothing():
    """Trees are packed in two orders, and one row is longer."""
    trees = {size: random_ends(size, size, 0.98) for size in (50, 40, 70)}
    tokens = {size: np.asarray(_tokens(1, size, seed=size)) for size in trees}
    assert all(depths_of(ends).max() > 2 * WINDOW for ends in trees.values())

    def packed(*sizes: int) -> dict[int, np.ndarray]:
        starts = np.cumsum((0, *sizes[:-1]))
        ends = [np.minimum(trees[n], n) + start for n, start in zip(sizes, starts, strict=True)]
        depths = np.concatenate([depths_of(trees[n]) for n in sizes])
        ids = np.concatenate([tokens[n] for n in sizes], axis=1)
        hidden, _ = run(PARAMS, MIXED, ids, depths[None], ends=np.concatenate(ends)[None])
        parts = np.split(np.asarray(hidden)[0], starts[1:])
        return dict(zip(sizes, parts, strict=True))

    first, second = packed(50, 40), packed(70, 40, 50)
    for size, states in first.items():
        np.testing.assert_allclose(second[size], states, atol=2e-5)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("config", [MIXED, ALL_LOCAL], ids=["mixed", "all local"])
def test_chunked_prefill_then_decode_equals_one_full_pass(config: DecoderConfig, platform: str):
    """Chunks are shorter and longer than the window, and the rows have several segments."""
    params, length = _params(config), 300
    tokens, positions = _tokens(2, length), _depths(2, length)
    full, _ = run(params, config, tokens, positions)
    cache = init_cache(config.shape, 2, 384, platform=platform)
    if platform == "gpu":
        assert can_stack(config) and cache.stacked == config.shape.num_layers
        params = stack_layers(params)
    parts = []
    borders = [0, 64, 68, 260, 290, *range(296, length + 1)]
    for start, stop in itertools.pairwise(borders):
        chunk = slice(start, stop)
        hidden, cache = run(params, config, tokens[:, chunk], positions[:, chunk], cache=cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, atol=3e-5)


def test_window_as_long_as_the_row_is_as_none():
    wide = with_mixers(MIXED, window=LENGTH)
    none = with_mixers(MIXED, window=None)
    tokens, positions = _tokens(2, LENGTH), _depths(2, LENGTH)
    ends = np.stack([random_ends(LENGTH, seed, 0.97) for seed in (1, 2)])
    depths = jnp.asarray(np.stack([depths_of(row) for row in ends]))
    weights = jax.random.normal(jax.random.key(2), tokens.shape)
    arrays = tokens, depths, jnp.asarray(ends), weights
    for a, b in zip(
        *(jax.tree.leaves(_read(PARAMS, c, *arrays)) for c in (wide, none)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    cached = []
    for config in (wide, none):
        cache = init_cache(config.shape, 2, 256)
        cached.append(run(PARAMS, config, tokens, positions, cache=cache)[0])
    np.testing.assert_allclose(*cached, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("remat", "scans"), [("full", True), ("mlp", True), ("full", False)])
def test_scan_of_the_period_has_the_gradient_of_single_layers(remat: RematKind, scans: bool):
    assert MIXED.shape.period == 3  # and the last two layers are part of a period
    tokens, weights = _tokens(2, 40), jnp.ones((2, 40))
    arrays = tokens, _depths(2, 40), None, weights
    config = MIXED.with_execution(scans_layers=scans)
    assert_close(_read(PARAMS, config, *arrays, remat=remat), _read(PARAMS, MIXED, *arrays))


def test_equal_layers_are_one_program():
    text = run.lower(PARAMS, MIXED, _tokens(1, 20), _depths(1, 20)).as_text()
    assert text.count("func.func private @_layer") == 2
    assert text.count("call @_layer") == 5


def test_one_and_eight_devices_agree():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    ends = np.stack([random_ends(LENGTH, seed, 0.98) for seed in range(8)])
    depths = np.stack([depths_of(row) for row in ends])
    assert depths.max() > 5 * WINDOW
    weights = jax.random.normal(jax.random.key(2), (8, LENGTH))
    rows = _tokens(8, LENGTH), jnp.asarray(depths), jnp.asarray(ends), weights
    expected = _read(PARAMS, MIXED, *rows)
    sharded = jax.device_put(PARAMS, param_shardings(MIXED, mesh))
    on_mesh = jax.device_put(rows, batch_sharding(mesh))
    found = _read(sharded, MIXED, *on_mesh, remat="full", gather=make_gather(MIXED, mesh))
    assert_close(found, expected)


def test_routes_of_a_path_are_those_of_its_cache():
    block = Block(Attention(4, 2, 8, window=WINDOW), Experts(4, 2, 24))
    config = DecoderConfig(DecoderShape(64, 32, (block, replace(block, mixer=WHOLE.mixer))))
    params = jax.tree.map(lambda leaf: 5 * leaf, init_params(config, jax.random.key(0)))
    tokens, positions = _tokens(1, 40), _depths(1, 40)
    row, _ = forward_routes(params, config, tokens, positions)
    cache = init_cache(config.shape, 1, 64)
    first, cache = forward_routes(params, config, tokens[:, :25], positions[:, :25], cache=cache)
    rest, _ = forward_routes(params, config, tokens[:, 25:], positions[:, 25:], cache=cache)
    np.testing.assert_array_equal(np.concatenate((first.ids, rest.ids), axis=2), row.ids)
    np.testing.assert_allclose(rest.entropy, row.entropy[:, :, 25:], atol=1e-5)
