"""Tests of prefill and decode against a full pass, forests against separate rows, and padding."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded import raises_coded
from jax.ad_checkpoint import print_saved_residuals

from lightning_jax.errors import InvalidValue
from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.config import RematKind
from lightning_jax.models.shape import Attention, Block, DecoderConfig, DecoderShape, Dense
from lightning_jax.models.transformer import KEPT, _embed, forward, init_params, unembed
from lightning_jax.testing.tiny import tiny_model

LENGTH = 170  # more than one block, and not a multiple of a block
MODEL = tiny_model(num_layers=1)
run = jax.jit(forward, static_argnums=1, static_argnames="remat")


def _tokens(rows, length, seed=1):
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, 259)


def _depths(rows, length):
    return jnp.broadcast_to(jnp.arange(length), (rows, length))


def test_chunked_prefill_then_decode_equals_one_full_pass():
    tokens, positions = _tokens(2, LENGTH), _depths(2, LENGTH)
    full, none = run(MODEL.params, MODEL.config, tokens, positions)
    assert none is None
    cache = init_cache(MODEL.config.shape, 2, 200)
    parts = []
    for start, stop in [(0, 150), (150, 166), *((t, t + 1) for t in range(166, LENGTH))]:
        chunk = slice(start, stop)
        hidden, cache = run(
            MODEL.params, MODEL.config, tokens[:, chunk], positions[:, chunk], cache=cache
        )
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_makes_no_copy_of_the_table_of_embeddings(dtype):
    table, tokens = jnp.ones((4096, 32), dtype), _tokens(4, 8).reshape(4, 1, 8)
    config = MODEL.config.with_execution(activation_dtype="float32")

    @jax.jit
    def embeddings(table, tokens):
        def add(total, some):
            embed = partial(_embed, config=config, tokens=some)
            return total + jax.vjp(embed, {"embed": {"embedding": table}})[0], None

        return jax.lax.scan(add, jnp.zeros((1, 8, 32)), tokens)[0]

    compiled = embeddings.lower(table, tokens).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < table.nbytes
    np.testing.assert_array_equal(compiled(table, tokens), 4)


def test_prefill_padding_is_not_written_and_changes_nothing():
    tokens, positions = _tokens(1, 160), _depths(1, 160)
    padded = positions.at[:, 100:].set(256)
    cache = init_cache(MODEL.config.shape, 1, 256)
    expected, _ = run(MODEL.params, MODEL.config, tokens, positions, cache=cache)
    hidden, cache = run(MODEL.params, MODEL.config, tokens, padded, cache=cache)
    np.testing.assert_allclose(hidden[:, :100], expected[:, :100], atol=1e-5)
    assert np.isfinite(hidden).all()
    assert np.abs(cache.layers[0].values[0][0, :, 99]).max() > 0
    assert not np.any(cache.layers[0].values[0][0, :, 100:])


def test_decode_rows_are_independent():
    tokens = _tokens(3, 40)
    cache = init_cache(MODEL.config.shape, 3, 64)
    _, cache = run(MODEL.params, MODEL.config, tokens, _depths(3, 40), cache=cache)
    token, position = _tokens(3, 1, seed=2), jnp.array([[40], [25], [64]])  # the last one is idle
    hidden, after = run(MODEL.params, MODEL.config, token, position, cache=cache)
    alone_cache = jax.tree.map(lambda x: x[1:2], cache)
    alone, _ = run(MODEL.params, MODEL.config, token[1:2], position[1:2], cache=alone_cache)
    np.testing.assert_allclose(hidden[1:2], alone, atol=1e-5)
    changed = np.any(after.layers[0].keys[0] != cache.layers[0].keys[0], axis=(1, 2))
    assert np.argwhere(changed).tolist() == [[0, 40], [1, 25]]


def test_branches_of_a_tree_have_the_hidden_states_of_their_paths():
    trunk, left, right = _tokens(1, 60, 3)[0], _tokens(1, 50, 4)[0], _tokens(1, 40, 5)[0]
    tokens = jnp.concatenate((trunk, left, right))[None]
    positions = jnp.concatenate((jnp.arange(60), jnp.arange(60, 110), jnp.arange(60, 100)))[None]
    ends = jnp.concatenate((jnp.full(60, 150), jnp.full(50, 110), jnp.full(40, 150)))[None]
    hidden, _ = run(MODEL.params, MODEL.config, tokens, positions, ends=ends)
    for branch, where in ((left, slice(60, 110)), (right, slice(110, 150))):
        path = jnp.concatenate((trunk, branch))[None]
        alone, _ = run(MODEL.params, MODEL.config, path, _depths(1, path.shape[1]))
        np.testing.assert_allclose(hidden[:, where], alone[:, 60:], atol=2e-5)


@partial(jax.jit, static_argnames="remat")
def _grads(params, tokens, positions, ends, remat):
    def loss(params):
        hidden, _ = forward(params, MODEL.config, tokens, positions, ends=ends, remat=remat)
        return (unembed(params, MODEL.config, hidden) ** 2).mean()

    return jax.grad(loss)(params)


@pytest.mark.parametrize("remat", KEPT)
@pytest.mark.parametrize("length", [20, LENGTH])  # without and with blocks
def test_remat_changes_no_gradient(remat: RematKind, length: int):
    tokens, positions = _tokens(1, length), _depths(1, length)
    ends = jnp.full((1, length), length)
    kept = _grads(MODEL.params, tokens, positions, ends, remat="none")
    recomputed = _grads(MODEL.params, tokens, positions, ends, remat=remat)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-7, rtol=1e-4)


def test_each_kind_of_remat_keeps_what_it_names(capsys: pytest.CaptureFixture[str]):
    """Count the arrays of two layers that wait for the backward pass, by shape."""
    model = tiny_model(num_layers=2)
    config = model.config.with_execution(scans_layers=False)
    tokens, positions = _tokens(1, LENGTH), _depths(1, LENGTH)

    def kept(remat: RematKind) -> Counter[str]:
        def loss(params):
            return forward(params, config, tokens, positions, remat=remat)[0].sum()

        print_saved_residuals(loss, model.params)
        lines = [line for line in capsys.readouterr().out.splitlines() if "'_layer'" in line]
        return Counter(line.split()[0] for line in lines)

    last = Counter({f"f32[1,{LENGTH},32]": 1})  # input of the second layer
    results = Counter({f"f32[1,{LENGTH},4,8]": 2, f"f32[1,2,2,{LENGTH}]": 2})  # of attention
    products = Counter(
        {f"f32[1,{LENGTH},32]": 2, f"f32[1,{LENGTH},16]": 4, f"f32[1,{LENGTH},64]": 4}
    )  # q; k and v; gate and up
    assert kept("full") == last
    assert kept("attention") == last + results
    assert kept("mlp") == last + results + products
    assert kept("none").total() > kept("mlp").total()


def test_layers_without_a_scan_have_its_gradient_and_no_stacked_weights():
    model = tiny_model(num_layers=2)
    tokens, positions = _tokens(1, LENGTH), _depths(1, LENGTH)
    found = []
    for scans in (True, False):
        config = model.config.with_execution(scans_layers=scans)

        def loss(params, tokens, positions, config=config):
            return forward(params, config, tokens, positions, remat="full")[0].sum()

        program = jax.jit(jax.grad(loss)).lower(model.params, tokens, positions)
        stacked = "tensor<2x32x64xf32>" in program.as_text()  # the stacked gate kernels
        assert stacked == scans
        found.append(program.compile()(model.params, tokens, positions))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-4, rtol=1e-4)


def test_angles_are_made_once():
    model = tiny_model(num_layers=2)

    def loss(params, tokens, positions):
        return forward(params, model.config, tokens, positions)[0].sum()

    arrays = model.params, _tokens(1, 32), _depths(1, 32)
    text = jax.jit(jax.grad(loss)).lower(*arrays).compile().as_text()
    assert text is not None
    assert (text.count(" cosine("), text.count(" sine(")) == (1, 1)


def test_bfloat16_stays_bfloat16_and_near_float32():
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MODEL.params)
    tokens, positions = _tokens(1, LENGTH), _depths(1, LENGTH)
    full, _ = run(MODEL.params, MODEL.config, tokens, positions)
    hidden, _ = run(small, MODEL.config, tokens, positions)
    assert hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(hidden.astype(jnp.float32), full, atol=0.1)
    assert unembed(small, MODEL.config, hidden).dtype == jnp.float32


def test_untied_head_and_impossible_shapes():
    blocks = (Block(Attention(2, 1, 4), Dense(8)),)
    config = DecoderConfig(DecoderShape(7, 8, blocks, tie_embeddings=False))
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    assert params["head"]["kernel"].shape == (8, 7)
    assert params["layers_0"]["q"]["kernel"].dtype == jnp.bfloat16
    with raises_coded(InvalidValue, "mismatch", "num_heads"):
        Attention(3, 2, 4)
    with raises_coded(InvalidValue, "invalid", "head_dim"):
        Attention(2, 1, 5)


def test_the_gradient_of_a_bfloat16_embedding_is_added_in_float32():
    """Check a token that occurs 2,000 times. A bfloat16 sum would stop growing at 256."""
    params = {"embed": {"embedding": jnp.ones((259, 32), jnp.bfloat16)}}
    tokens = jnp.zeros((1, 2000), jnp.int32)

    def total(params, tokens):
        return _embed(params, MODEL.config, tokens).astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(total))(params, tokens)["embed"]["embedding"]
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(grad[0].astype(jnp.float32), 2000.0)
    assert not np.any(grad[1:])
