"""Tests of experts: products of groups, the router, gradients, the cache and several devices."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.blocks import experts, ragged
from lightning_jax.models.blocks.layer import adapted_kernels_of, axes_of, kernels_of, share_of
from lightning_jax.models.blocks.matmul import turn_kernels
from lightning_jax.models.blocks.parts import Parts
from lightning_jax.models.blocks.ragged import _whole, ragged_matmul
from lightning_jax.models.config import MeshConfig, RematKind
from lightning_jax.models.memory import activation_bytes, weight_bytes
from lightning_jax.models.mesh import batch_sharding, make_mesh
from lightning_jax.models.shape import (
    Attention,
    Block,
    DecoderConfig,
    DecoderShape,
    Execution,
    Experts,
    Norm,
)
from lightning_jax.models.sharding import cache_sharding, make_gather, param_shardings
from lightning_jax.models.transformer import (
    forward,
    forward_routes,
    init_params,
    param_shapes,
    stack_layers,
    unembed,
)

MIXER = Attention(4, 2, 8, qk_norm="head")
EXPERTS = Experts(4, 2, 24)
CONFIG = DecoderConfig(DecoderShape(48, 32, 2 * (Block(MIXER, EXPERTS),)))
LENGTH = 24
run = jax.jit(forward, static_argnums=1)


def _params(config: DecoderConfig = CONFIG):
    params = init_params(config, jax.random.key(0))
    return jax.tree.map(lambda leaf: 8 * leaf if leaf.ndim > 1 else leaf, params)


def _with_router(params, change):
    """Return the parameters with the kernels of all routers changed."""
    return {
        name: leaf
        if "router" not in leaf
        else {**leaf, "router": {"kernel": change(leaf["router"]["kernel"])}}
        for name, leaf in params.items()
    }


def _rows(rows: int = 4):
    tokens = jax.random.randint(jax.random.key(1), (rows, LENGTH), 0, 48)
    return tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)


def _reference(rows, kernels, sizes):
    """Return the products, computed one row at a time in float64."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    out = np.zeros((len(rows), kernels.shape[2]))
    for index, group in enumerate(groups):
        out[index] = np.asarray(rows[index], np.float64) @ np.asarray(kernels[group], np.float64)
    return out


# Groups of one row, of none, of several blocks, and rows of no group.
SIZES = {
    "mixed": [3, 0, 37, 9, 1],
    "one": [0, 0, 64, 0, 0],
    "rest": [0, 20, 0, 0, 4],
    "no": [0] * 5,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_group_of_rows_has_the_kernel_of_its_own(name: str):
    sizes = jnp.array(SIZES[name], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    rows, kernels = jax.random.normal(keys[0], (64, 6)), jax.random.normal(keys[1], (5, 6, 7))
    np.testing.assert_allclose(
        jax.jit(ragged_matmul)(rows, kernels, sizes), _reference(rows, kernels, sizes), atol=1e-5
    )
    # The gradient is that of XLA's own product, of a loss that reads no row beyond the groups.
    weights = jax.random.normal(keys[2], (64, 7)) * (jnp.arange(64) < sizes.sum())[:, None]

    def loss(f: Any, rows: Any, kernels: Any) -> Any:
        return (f(rows, kernels, sizes) * weights).sum()

    both = ragged_matmul, _whole
    ours, theirs = (jax.grad(partial(loss, f), (0, 1))(rows, kernels) for f in both)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rows_beyond_the_groups_add_nothing_whatever_they_are():
    sizes, kernels = jnp.array([2, 1], jnp.int32), jnp.ones((2, 3, 3))
    rows = jnp.ones((5, 3)).at[3:].set(jnp.nan)
    out, pull = jax.vjp(partial(ragged_matmul, sizes=sizes), rows, kernels)
    assert not np.any(out[3:])
    for grad in pull(jnp.full_like(out, jnp.nan).at[:3].set(1.0)):
        assert np.all(np.isfinite(grad))


def test_tokamax_has_the_products_of_the_loop(monkeypatch: pytest.MonkeyPatch):
    """With its XLA implementation, as on a GPU without kernels for these arrays."""
    pytest.importorskip("tokamax")
    keys = jax.random.split(jax.random.key(0), 2)
    rows, kernels = jax.random.normal(keys[0], (43, 16)), jax.random.normal(keys[1], (5, 16, 8))
    sizes = jnp.array([3, 0, 30, 9, 1], jnp.int32)
    expected = _whole(rows, kernels, sizes)
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(ragged, "get_default_device", lambda: gpu)
    np.testing.assert_allclose(_whole(rows, kernels, sizes), expected, atol=1e-5)


def test_bfloat16_kernels_round_rows_and_keep_float32_sums():
    keys = jax.random.split(jax.random.key(0), 2)
    rows, kernels = jax.random.normal(keys[0], (8, 64)), jax.random.normal(keys[1], (2, 64, 4))
    sizes = jnp.array([5, 3], jnp.int32)
    out = ragged_matmul(rows, kernels.astype(jnp.bfloat16), sizes)
    left, right = (side.astype(jnp.bfloat16).astype(jnp.float32) for side in (rows, kernels))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, _reference(left, right, sizes), atol=1e-4)


def test_a_token_gets_the_weighted_sum_of_its_experts():
    """Compare with every expert computed for every token, without sorting."""
    block = DecoderConfig(DecoderShape(48, 32, (Block(MIXER, EXPERTS),)))
    layer = _params(block)["layers_0"]
    x = jax.random.normal(jax.random.key(3), (2, 5, 32))
    shares = jax.nn.softmax(x @ layer["router"]["kernel"])
    gate, up = (
        jnp.einsum("bte,nem->btnm", x, layer[f"experts_{n}"]["kernel"]) for n in ("gate", "up")
    )
    every = jnp.einsum("btnm,nme->btne", jax.nn.silu(gate) * up, layer["experts_down"]["kernel"])
    least = jnp.sort(shares)[..., -2:-1]
    for is_one in (True, False):
        weights = jnp.where(shares >= least, shares, 0.0)
        weights = weights / weights.sum(-1, keepdims=True) if is_one else weights
        spec = Experts(4, 2, 24, renormalise=is_one)
        np.testing.assert_allclose(
            _apply(spec, layer, x), (every * weights[..., None]).sum(2), atol=1e-5
        )


class _Mlp(nn.Module):
    spec: Experts

    @nn.compact
    def __call__(self, x):
        return experts.apply(self.spec, Parts(Norm(), Execution(), None), x)


def _apply(spec: Experts, layer, x) -> Any:
    return _Mlp(spec).apply({"params": {name: layer[name] for name in experts.KERNELS}}, x)


def test_a_token_does_not_depend_on_its_neighbours():
    layer, keys = _params()["layers_0"], jax.random.split(jax.random.key(3), 2)
    x, others = (jax.random.normal(key, (3, 20, 32)) for key in keys)
    one = others.at[1, 7].set(x[1, 7])
    mix = jax.jit(partial(_apply, EXPERTS))
    np.testing.assert_array_equal(mix(layer, x)[1, 7], mix(layer, one)[1, 7])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_prefill_and_decode_equal_one_full_pass(platform: str, is_turned: bool):
    params, (tokens, positions) = _params(), _rows(2)
    full, _ = run(params, CONFIG, tokens, positions)
    config, cache = CONFIG, init_cache(CONFIG.shape, 2, 64, platform=platform)
    if is_turned:
        config, params = CONFIG.with_execution(turned=True), turn_kernels(params)
    elif platform == "gpu":
        params = stack_layers(params)
    parts = []
    for start, stop in [(0, 17), (17, 22), (22, 23), (23, 24)]:
        chunk = slice(start, stop)
        hidden, cache = run(params, config, tokens[:, chunk], positions[:, chunk], cache=cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, atol=2e-5)


@partial(jax.jit, static_argnames=("config", "remat", "gather"))
def _grads(params, config, tokens, positions, ends=None, remat: RematKind = "none", gather=None):
    """Return the sum of a loss over tokens, its gradient and the hidden states."""

    def loss(params):
        hidden, _ = forward(
            params, config, tokens, positions, ends=ends, remat=remat, gather=gather
        )
        return (unembed(params, config, hidden) ** 2).mean(axis=-1).sum(), hidden

    return jax.grad(loss, has_aux=True)(params)


def _assert_close(ours, theirs) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)


def test_a_forest_equals_separate_rows():
    """Two branches of one trunk, and their rows without the trunk's own loss counted twice."""
    config, params = CONFIG.with_execution(trains_router=True), _params()
    trunk, left, right = jnp.arange(1, 7), jnp.array([9, 8, 7]), jnp.array([20, 21])
    tokens = jnp.concatenate((trunk, left, right))[None]
    positions = jnp.array([[*range(9), 6, 7]])
    ends = jnp.array([[11] * 6 + [9] * 3 + [11] * 2])
    forest = _grads(params, config, tokens, positions, ends)
    rows = [jnp.concatenate((trunk, part))[None] for part in (left, right)]
    grads, hidden = zip(*(_grads(params, config, row, _index(row)) for row in rows), strict=True)
    only_trunk = _grads(params, config, trunk[None], _index(trunk[None]))[0]
    expected = jax.tree.map(lambda a, b, c: a + b - c, *grads, only_trunk)
    _assert_close(forest[0], expected)
    nodes = jnp.concatenate((hidden[0], hidden[1][:, 6:]), axis=1)
    np.testing.assert_allclose(forest[1], nodes, atol=1e-5)


def _index(row):
    return jnp.arange(row.shape[1])[None]


@pytest.mark.parametrize("remat", ["mlp", "full"])
def test_recomputation_has_the_same_gradient(remat: RematKind):
    rows, params = _rows(2), _params()
    _assert_close(_grads(params, CONFIG, *rows, remat=remat), _grads(params, CONFIG, *rows))


def test_a_router_has_a_gradient_only_if_it_is_trained():
    params, rows = _params(), _rows(2)
    frozen, _ = _grads(params, CONFIG, *rows)
    trained, _ = _grads(params, CONFIG.with_execution(trains_router=True), *rows)
    for layer in ("layers_0", "layers_1"):
        assert not np.any(frozen[layer].pop("router")["kernel"])
        assert np.abs(trained[layer].pop("router")["kernel"]).max() > 1e-3
    _assert_close(frozen, trained)


def _to_one(kernel):
    """Give every token the first experts: their logits are the same for every input, and high."""
    return 0 * kernel


ROUTERS = {"uneven": lambda kernel: kernel, "one": _to_one}
MESHES = {"all": (1, 2, 2, 0, 2), "expert": (1, 1, 1, 0, 4), "data": (2, 1, 2, 0, 2)}


@pytest.mark.parametrize(
    ("sizes", "router"), [("all", "uneven"), ("all", "one"), ("expert", "uneven"), ("data", "one")]
)
def test_one_and_eight_devices_agree(sizes: str, router: str):
    """With all routers 0, every token goes to experts 0 and 1, and two experts get none."""
    mesh = make_mesh(MeshConfig(*MESHES[sizes]))
    params, rows = _with_router(_params(), ROUTERS[router]), _rows(8)
    config = CONFIG.with_execution(trains_router=True)
    routes, _ = forward_routes(params, config, *rows)
    assert set(np.unique(routes.ids)) == ({0, 1} if router == "one" else {0, 1, 2, 3})
    placed = jax.device_put(params, param_shardings(config, mesh))
    rows_placed = jax.device_put(rows, batch_sharding(mesh))
    expected = _grads(params, config, *rows)
    gather = make_gather(config, mesh)
    _assert_close(_grads(placed, config, *rows_placed, gather=gather), expected)
    if sizes == "all":
        _assert_close(_grads(placed, config, *rows_placed, remat="full", gather=gather), expected)


def test_decode_of_rows_that_devices_do_not_divide_agrees():
    mesh, params = make_mesh(MeshConfig(1, 2, 2, 0, 2)), _params()
    tokens, positions = (part[:3] for part in _rows())
    cache = init_cache(CONFIG.shape, 3, 32)
    expected, _ = run(params, CONFIG, tokens, positions, cache=cache)
    placed = jax.device_put(params, param_shardings(CONFIG, mesh))
    cache = jax.device_put(cache, cache_sharding(CONFIG.shape, mesh))
    hidden, _ = run(placed, CONFIG, tokens, positions, cache=cache)
    np.testing.assert_allclose(hidden, expected, atol=1e-5)


def test_experts_are_split_by_expert_embedding_and_feature():
    mesh = make_mesh(MeshConfig(1, 2, 2, 0, 2))
    layer = param_shardings(CONFIG, mesh)["layers_0"]
    assert layer["experts_up"]["kernel"].spec == jax.P(("expert",), ("fsdp",), ("tensor",))
    assert layer["experts_down"]["kernel"].spec == jax.P(("expert",), ("tensor",), ("fsdp",))
    leaves = jax.tree.leaves(param_shapes(CONFIG))
    placed = jax.device_put(_params(), param_shardings(CONFIG, mesh))
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert weight_bytes(CONFIG, mesh, jnp.float32) == here < 4 * sum(leaf.size for leaf in leaves)


def test_blocks_tell_what_experts_need():
    block = CONFIG.shape.blocks[0]
    assert adapted_kernels_of(block) == ("q", "k", "v", "o")
    assert kernels_of(block)[4:] == experts.KERNELS
    assert (share_of(block, "experts_up"), share_of(block, "router")) == (0.5, 1.0)
    assert ("experts_up", "lora_a") not in axes_of(block)
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    # Of the embedding, the query heads, the key heads and three products of two experts.
    layer = 4 * 32 + 3 * 32 + 3 * 16 + 3 * 2 * 24 + 2 * 2 * 32
    kept = activation_bytes(CONFIG, mesh, remat="full", dtype=jnp.float32)
    assert kept == 4 * (2 * 32 + 2 * layer)
    # Two devices that share experts have each other's tokens there.
    mesh = make_mesh(MeshConfig(1, 1, 1, 0, 2), jax.devices()[:2])
    shared = layer + 3 * 2 * 24 + 2 * 2 * 32
    kept = activation_bytes(CONFIG, mesh, remat="full", dtype=jnp.float32)
    assert kept == 4 * (2 * 32 + 2 * shared)
