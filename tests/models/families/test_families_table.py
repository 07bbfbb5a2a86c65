"""Tests of every family: passes through the cache, rows of a forest, and the plan of memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_models import variant

from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.families.table import FAMILIES, SHAPES
from lightning_jax.models.memory import weight_bytes
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import forward, unembed

TRUNK, LEFT, RIGHT = 14, 8, 6
run = jax.jit(forward, static_argnums=1)
tokens = jax.random.randint(jax.random.key(1), (1, TRUNK + LEFT + RIGHT), 0, 259)


@partial(jax.jit, static_argnums=1)
def _grads(params, config, tokens, positions, ends, weights):
    def loss(params):
        hidden, _ = forward(params, config, tokens, positions, ends=ends)
        return (weights * jnp.sin(unembed(params, config, hidden))).sum()

    return jax.grad(loss)(params)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_a_prompt_and_single_tokens_equal_one_pass(family: str):
    model = variant(family)
    positions = jnp.arange(tokens.shape[1])[None]
    full, _ = run(model.params, model.config, tokens, positions)
    cache, parts = init_cache(model.config.shape, 1, 32), []
    for start, stop in [(0, 17), (17, 26), (26, 27), (27, 28)]:
        chunk = tokens[:, start:stop], positions[:, start:stop]
        hidden, cache = run(model.params, model.config, *chunk, cache=cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forest_has_the_gradient_of_its_paths(family: str):
    """The trunk's tokens count once, in the path of its left branch."""
    model = variant(family)
    stop, end = TRUNK + LEFT, tokens.shape[1]
    positions = jnp.concatenate((jnp.arange(stop), jnp.arange(TRUNK, TRUNK + RIGHT)))[None]
    ends = jnp.array([TRUNK * [end] + LEFT * [stop] + RIGHT * [end]])
    weights = jnp.linspace(0.5, 2.0, end)[None, :, None]
    forest = _grads(model.params, model.config, tokens, positions, ends, weights)
    paths = []
    for branch, others in ((slice(TRUNK, stop), 1.0), (slice(stop, end), 0.0)):
        parts = (jnp.concatenate((row[:, :TRUNK], row[:, branch]), 1) for row in (tokens, weights))
        path, counted = parts
        counted = counted.at[:, :TRUNK].multiply(others)
        places = jnp.arange(path.shape[1])[None]
        paths.append(_grads(model.params, model.config, path, places, None, counted))
    separate = jax.tree.map(jnp.add, *paths)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(separate)) > 0.1
    for ours, theirs in zip(jax.tree.leaves(forest), jax.tree.leaves(separate), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_has_the_bytes_of_the_leaves(family: str):
    model, mesh = variant(family), make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    leaves = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    assert weight_bytes(model.config, mesh, jnp.float32) == 4 * leaves


@pytest.mark.parametrize(
    ("hub_id", "billions"),
    [
        ("google/gemma-3-270m-it", 0.268),
        ("google/gemma-3-1b-it", 1.000),
        ("google/gemma-3-4b-it", 3.880),  # without the tower of its images
        ("google/gemma-3-12b-it", 11.766),
        ("google/gemma-3-27b-it", 27.009),
        ("HuggingFaceTB/SmolLM3-3B", 3.075),
        ("ibm-granite/granite-4.0-micro", 3.403),
        ("microsoft/Phi-4-mini-instruct", 3.836),
    ],
)
def test_a_shape_by_hub_id_has_the_published_number_of_weights(hub_id: str, billions: float):
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    number = weight_bytes(DecoderConfig(SHAPES[hub_id]), mesh, jnp.float32) / 4
    assert number / 1e9 == pytest.approx(billions, abs=0.001)
