"""Tests of layers of several kinds in one model: passes, gradients, the cache and several devices.

The model repeats two blocks that differ in rotary positions, norms and heads, and ends with a part
of the pattern.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models import transformer
from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.blocks import dense, self_attention
from lightning_jax.models.blocks.layer import axes_of, kernels_of, units_of
from lightning_jax.models.blocks.parts import LayerInputs, Parts, RMSNorm
from lightning_jax.models.config import MeshConfig, RematKind
from lightning_jax.models.memory import activation_bytes, decode_bytes, weight_bytes
from lightning_jax.models.mesh import batch_sharding, make_mesh
from lightning_jax.models.shape import (
    Attention,
    Block,
    DecoderConfig,
    DecoderShape,
    Dense,
    Execution,
    Norm,
    Rope,
)
from lightning_jax.models.sharding import cache_sharding, make_gather, param_shardings
from lightning_jax.models.transformer import (
    STACK,
    can_stack,
    forward,
    init_params,
    layer_of,
    param_shapes,
    stack_layers,
    unembed,
)

FIRST = Block(
    Attention(4, 2, 8, Rope(500.0), qk_norm="projection", scale=0.2),
    Dense(40),
    norms="after",
    residual_scale=0.5,
)
SECOND = Block(Attention(4, 4, 8, None, bias=True, qk_norm="head"), Dense(40))
UNLIKE = DecoderConfig(
    DecoderShape(48, 32, (FIRST, SECOND, FIRST, SECOND, FIRST), embed_scale=3.0, logit_divisor=0.5)
)
ROTATED = Block(Attention(4, 2, 8, Rope()), Dense(40))
PLAIN = Block(Attention(4, 2, 8, None), Dense(40))
ALIKE = DecoderConfig(DecoderShape(48, 32, (ROTATED, PLAIN, ROTATED)))
LENGTH = 40
run = jax.jit(forward, static_argnums=1, static_argnames="remat")


def _params(config: DecoderConfig):
    params = init_params(config, jax.random.key(0))
    return jax.tree.map(lambda leaf: 3 * leaf + 0.05, params)


def _tokens(rows: int = 2):
    tokens = jax.random.randint(jax.random.key(1), (rows, LENGTH), 0, 48)
    return tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)


@partial(jax.jit, static_argnames=("config", "remat", "gather"))
def _grads(params, config, tokens, positions, remat: RematKind = "none", gather=None):
    def loss(params):
        hidden, _ = forward(params, config, tokens, positions, remat=remat, gather=gather)
        return (unembed(params, config, hidden) ** 2).mean()

    return jax.grad(loss)(params)


def assert_close(ours, theirs) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("remat", "scans"), [("mlp", True), ("full", True), ("full", False)])
def test_a_scan_of_the_period_has_the_gradient_of_single_layers(remat: RematKind, scans: bool):
    config, params = UNLIKE.with_execution(scans_layers=scans), _params(UNLIKE)
    assert_close(_grads(params, config, *_tokens(), remat), _grads(params, UNLIKE, *_tokens()))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("config", [UNLIKE, ALIKE], ids=["unlike", "alike"])
def test_prefill_and_decode_equal_one_full_pass(config: DecoderConfig, platform: str):
    params, (tokens, positions) = _params(config), _tokens()
    full, _ = run(params, config, tokens, positions)
    cache = init_cache(config.shape, 2, 64, platform=platform)
    assert cache.stacked == (3 if platform == "gpu" and config is ALIKE else 1)
    if can_stack(config):
        params = stack_layers(params)
    parts = []
    for start, stop in [(0, 30), (30, 38), (38, 39), (39, 40)]:
        chunk = slice(start, stop)
        hidden, cache = run(params, config, tokens[:, chunk], positions[:, chunk], cache=cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, atol=2e-5)


def test_only_layers_of_equal_shapes_are_stacked():
    assert can_stack(ALIKE) and not can_stack(UNLIKE)
    stacked = jax.eval_shape(stack_layers, param_shapes(ALIKE))
    assert stacked[STACK]["q"]["kernel"].shape == (3, 32, 32)


def test_shapes_of_all_layers_come_from_those_of_distinct_blocks():
    shapes = param_shapes(UNLIKE)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, _params(UNLIKE))
    assert layer_of(shapes, 4)["q_norm"]["scale"].shape == (32,)
    assert layer_of(shapes, 3)["q_norm"]["scale"].shape == (8,)


def test_one_and_eight_devices_agree():
    mesh, params, rows = make_mesh(MeshConfig(1, 2, 4)), _params(UNLIKE), _tokens(8)
    shardings = param_shardings(UNLIKE, mesh)
    # Two key heads cannot be split among four devices, four can.
    assert shardings["layers_0"]["k"]["kernel"].spec == jax.P(("fsdp",), None)
    assert shardings["layers_1"]["k"]["kernel"].spec == jax.P(("fsdp",), ("tensor",))
    assert cache_sharding(UNLIKE.shape, mesh).spec == jax.P(None, None, None, None)
    sharded = jax.device_put(params, shardings), jax.device_put(rows, batch_sharding(mesh))
    expected = _grads(params, UNLIKE, *rows)
    for remat in ("none", "full"):
        gather = make_gather(UNLIKE, mesh)
        found = _grads(sharded[0], UNLIKE, *sharded[1], remat, gather)
        assert_close(found, expected)


def test_memory_is_that_of_each_block():
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    sizes = [leaf.size for leaf in jax.tree.leaves(_params(UNLIKE))]
    assert weight_bytes(UNLIKE, mesh, jnp.float32) == 4 * sum(sizes)
    # Three blocks have 2 key heads of 8, two have 4.
    assert decode_bytes(UNLIKE, mesh, jnp.bfloat16)[1] == {None: 2 * 2 * 8 * (3 * 2 + 2 * 4)}
    local = replace(FIRST, mixer=replace(FIRST.mixer, window=5))
    windows = UNLIKE.with_shape(blocks=(local, SECOND, SECOND))
    read = {5: 2 * 2 * 8 * 2, None: 2 * 2 * 8 * 2 * 4}
    assert decode_bytes(windows, mesh, jnp.bfloat16)[1] == read
    # Of the embedding, the query heads, the key heads and the MLP.
    second = 4 * 32 + 3 * 32 + 3 * 32 + 3 * 40
    recomputed = activation_bytes(UNLIKE, mesh, remat="attention", dtype=jnp.float32)
    # The input, the output of attention and a log-sum of each head.
    assert recomputed == 4 * (5 * (32 + 32 + 4) + 2 * second)


def test_blocks_tell_their_kernels_and_axes():
    assert kernels_of(FIRST) == ("q", "k", "v", "o", "gate", "up", "down")
    assert units_of(SECOND) == {"heads": 4, "kv_heads": 4, "mlp": 40}
    axes = axes_of(SECOND)
    assert axes["down", "kernel"] == ("mlp", "embed")
    assert (axes["down", "lora_a"], axes["down", "lora_b"]) == (("mlp", None), (None, "embed"))
    names = {
        (part, leaf)
        for part, leaves in layer_of(param_shapes(UNLIKE), 1).items()
        for leaf in leaves
    }
    assert {name for name in names if name[1] in ("kernel", "bias")} <= axes.keys()


def test_a_wide_norm_is_rounded_once():
    x = jnp.arange(1.0, 40.0).astype(jnp.bfloat16)[None]
    scale = jnp.linspace(1.0, 1.3, 39).astype(jnp.bfloat16)
    found = [
        jnp.asarray(RMSNorm(Norm(0.0, is_wide)).apply({"params": {"scale": scale}}, x))
        for is_wide in (True, False)
    ]
    wide, factors = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    exact = wide / np.sqrt((wide**2).mean()) * factors
    np.testing.assert_array_equal(found[0], jnp.asarray(exact, jnp.bfloat16))
    assert found[0].dtype == found[1].dtype == jnp.bfloat16
    assert np.sum(found[0] != found[1]) == 11


def test_a_norm_adds_its_offset_before_anything_is_rounded():
    x = jnp.arange(1.0, 40.0).astype(jnp.bfloat16)[None]
    stored = jnp.linspace(-0.003, 0.003, 39).astype(jnp.bfloat16)
    norm = RMSNorm(Norm(0.0, is_wide=True, offset=1.0))
    out: Any = norm.apply({"params": {"scale": stored}}, x)
    wide, factors = np.asarray(x, np.float64), 1 + np.asarray(stored, np.float64)
    exact = wide / np.sqrt((wide**2).mean()) * factors
    np.testing.assert_array_equal(out, jnp.asarray(exact, jnp.bfloat16))
    assert len({*np.asarray((1 + stored).astype(jnp.float32))}) == 2  # of 39 scales
    first: Any = norm.init(jax.random.key(0), x)
    assert not first["params"]["scale"].any()


GELU = Dense(40, "gelu_tanh")
AROUND = Block(Attention(4, 2, 8, Rope()), GELU, norms="around")


def test_norms_around_have_scales_before_and_after():
    shape = DecoderShape(48, 32, (AROUND,), norm=Norm(1e-5, is_wide=True, offset=1.0))
    config = DecoderConfig(shape)
    params = _params(config)
    names = {"attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"}
    assert names <= params["layers_0"].keys()
    tokens, positions = jnp.arange(6)[None], jnp.arange(6)[None]
    out, _ = run(params, config, tokens, positions)
    # A factor of 0 after the mixer and the MLP leaves the embeddings.
    layer = params["layers_0"]
    nothing = {name: {"scale": jnp.full(32, -1.0)} for name in ("attn_post_norm", "mlp_post_norm")}
    plain, _ = run(params | {"layers_0": layer | nothing}, config, tokens, positions)
    embedded: Any = RMSNorm(shape.norm).apply(
        {"params": params["final_norm"]}, params["embed"]["embedding"][tokens]
    )
    np.testing.assert_allclose(plain, embedded, atol=1e-6)
    assert np.abs(plain - out).max() > 0.1


def test_a_layer_with_norms_around_keeps_two_more_results():
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    before = Block(AROUND.mixer, AROUND.mlp)
    sizes = [
        activation_bytes(
            DecoderConfig(DecoderShape(48, 32, 3 * (block,))), mesh, remat="full", dtype="float32"
        )
        for block in (AROUND, before)
    ]
    assert sizes[0] - sizes[1] == 2 * 2 * 32 * 4  # of the layer at work and its gradients


def test_the_mlps_activation_is_gelu_by_its_tanh():
    config = DecoderConfig(DecoderShape(48, 32, (AROUND,)))
    x = jax.random.normal(jax.random.key(2), (1, 3, 32))
    layer = _params(config)["layers_0"]
    gate, up, down = (
        np.asarray(layer[name]["kernel"], np.float64) for name in ("gate", "up", "down")
    )

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return dense.apply(GELU, Parts(Norm(), config.execution, None), x)

    out: Any = Mlp().apply({"params": layer}, x)
    gates = np.asarray(x, np.float64) @ gate
    tanh = np.tanh(np.sqrt(2 / np.pi) * (gates + 0.044715 * gates**3))
    expected = (0.5 * gates * (1 + tanh) * (np.asarray(x, np.float64) @ up)) @ down
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_embeddings_are_scaled_in_the_dtype_of_their_table():
    shape = DecoderShape(48, 32, (PLAIN,), embed_scale=1152**0.5)  # 33.94, or 34 in bfloat16
    config = DecoderConfig(shape, Execution(activation_dtype="float32"))
    table = jnp.ones((48, 32), jnp.bfloat16)
    out = transformer._embed({"embed": {"embedding": table}}, config, jnp.zeros((1, 1), jnp.int32))
    assert out.dtype == jnp.float32 and (out == 34.0).all()
    out = transformer._embed(
        {"embed": {"embedding": jnp.ones((48, 32))}}, config, jnp.zeros((1, 1), jnp.int32)
    )
    np.testing.assert_allclose(out, 1152**0.5, rtol=1e-6)


def test_bfloat16_queries_are_scaled_by_a_factor_that_is_not_rounded():
    mixer = Attention(1, 1, 2, None, scale=0.8729 * 2**-0.5)
    queries, ones = jnp.asarray([[[1.5, 1.0]]], jnp.bfloat16), jnp.eye(2, dtype=jnp.bfloat16)

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x):
            inputs = LayerInputs(None, None, None, None, None)
            return self_attention._project(mixer, Parts(Norm(), Execution(), None), x, inputs)[0]

    kernels = {name: {"kernel": ones} for name in ("q", "k", "v")}
    out: Any = Mixer().apply({"params": kernels}, queries)
    exact = np.asarray(queries, np.float32)[:, :, None] * np.float32(0.8729)
    np.testing.assert_array_equal(out, jnp.asarray(exact).astype(jnp.bfloat16))
    rounded = queries[:, :, None] * jnp.asarray(0.8729, jnp.bfloat16)
    assert (out != rounded).any()
