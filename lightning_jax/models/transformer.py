"""Decoder of the Llama, SmolLM2, Qwen2.5 and Qwen3 families, for training, prefill and decode.

Parameters are a plain nested dict with one subtree per layer, so that a decode step reads each
weight in place:

    embed/embedding [V, E]   final_norm/scale [E]   head/kernel [E, V] unless embeddings are tied
    layers_0, layers_1, ...
        attn_norm, mlp_norm /scale [E]   q/kernel [E, H*D]   k, v /kernel [E, K*D]
        o/kernel [H*D, E]   gate, up /kernel [E, M]   down/kernel [M, E]
        q, k, v /bias (Qwen2)   q_norm, k_norm /scale [D] (Qwen3)
        .../lora_a [in, rank], lora_b [rank, out] next to kernels with an adapter (lora.py);
        [N, in, rank], [N, rank, out] if the rows of a batch choose among N adapters

For decoding on a CPU, each kernel [in, out] becomes a kernel_t [out, in] (matmul.py).
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lightning_jax.errors import InvalidValue
from lightning_jax.models.attention import attention
from lightning_jax.models.attention.kv_cache import KVCache, attend_cache, make_cache, write_cache
from lightning_jax.models.config import LoraConfig
from lightning_jax.models.matmul import matmul, matmul_turned, product
from lightning_jax.models.shape import DecoderConfig

Params = dict[str, Any]
Gather = Callable[[Params], Params]  # gathers all weights, or those of one layer, for use


def init_cache(
    config: DecoderConfig,
    slots: int,
    length: int,
    dtype: Any = jnp.float32,
    platform: str = "cpu",
) -> KVCache:
    """Build a cache of zeros for this model, in the layout of this platform."""
    return make_cache(
        layers=config.num_layers,
        rows=slots,
        length=length,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        platform=platform,
    )


class RMSNorm(nn.Module):
    """Division by the root mean square in float32, followed by a learned scale."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        # Two axes, because XLA on a CPU takes ten times as long for sums over the last axis of 3.
        wide = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide.astype(x.dtype) * jnp.broadcast_to(scale, wide.shape)).reshape(x.shape)


class Linear(nn.Module):
    """Product with a kernel, plus an optional adapter and an optional bias."""

    features: int
    bias: bool = False
    lora: LoraConfig | None = None
    num_adapters: int | None = None
    turned: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T _"], chosen: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T _"]:
        init = nn.initializers.normal(0.02)
        if self.turned:
            kernel = self.param("kernel_t", init, (self.features, x.shape[-1]))
            out = matmul_turned(x, kernel).astype(x.dtype)
        else:
            out = matmul(x, self.param("kernel", init, (x.shape[-1], self.features)))
        if self.lora is not None:
            out = out + self._adapter(x, self.lora, chosen)
        if not self.bias:
            return out
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return out + bias[None, None, :]

    def _adapter(self, x: Any, lora: LoraConfig, chosen: Any) -> Any:
        stack = () if self.num_adapters is None else (self.num_adapters,)
        init = nn.initializers.normal(x.shape[-1] ** -0.5)  # x A is about as large as x
        a = self.param("lora_a", init, (*stack, x.shape[-1], lora.rank))
        b = self.param("lora_b", nn.initializers.zeros, (*stack, lora.rank, self.features))
        if not stack:
            return matmul(lora.scale * matmul(x, a), b)
        low = jnp.einsum("bti,bir->btr", x, a[chosen])
        return jnp.einsum("btr,bro->bto", lora.scale * low, b[chosen])


class Layer(nn.Module):
    """Decoder layer that returns its output and, if given a cache, the updated cache."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self, x: Any, rope: Any, ends: Any, cached: Any, at: Any, rows: Any, chosen: Any
    ) -> tuple[Any, Any]:
        config = self.config
        h = RMSNorm(config.norm_eps, name="attn_norm")(x)
        queries, keys, values = self._project(h, rope, chosen)
        if cached is None:
            mixed = attention.attend_tree(queries, keys, values, ends)
        else:
            cached = write_cache(cached, keys, values, at, rows)
            mixed = attend_cache(queries, cached, at, rows)
        mixed = mixed.reshape(*mixed.shape[:2], config.num_heads * config.head_dim)
        x = x + self._linear("o", config.embed_dim)(mixed, chosen)
        h = RMSNorm(config.norm_eps, name="mlp_norm")(x)
        gate, up = (self._linear(name, config.mlp_dim)(h, chosen) for name in ("gate", "up"))
        return x + self._linear("down", config.embed_dim)(nn.silu(gate) * up, chosen), cached

    def _linear(self, name: str, features: int, *, bias: bool = False) -> Linear:
        lora = self.config.lora
        adapter = lora if lora is not None and name in lora.targets else None
        shared = self.config.num_adapters, self.config.turned
        return Linear(features, bias, adapter, *shared, name=name)

    def _project(self, h: Any, rope: Any, chosen: Any) -> tuple[Any, Any, Any]:
        """Return queries [B T H D], keys and values [B T K D], with rotary positions applied."""
        config = self.config
        heads_of = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        parts = {}
        for name, heads in heads_of.items():
            flat = self._linear(name, heads * config.head_dim, bias=config.qkv_bias)(h, chosen)
            parts[name] = flat.reshape(*flat.shape[:2], heads, config.head_dim)
        if config.qk_norm:
            parts["q"] = RMSNorm(config.norm_eps, name="q_norm")(parts["q"])
            parts["k"] = RMSNorm(config.norm_eps, name="k_norm")(parts["k"])
        return attention.rotate(parts["q"], *rope), attention.rotate(parts["k"], *rope), parts["v"]


@functools.partial(jax.jit, static_argnums=0)
def _layer(config: DecoderConfig, params: Params, *arrays: Any) -> tuple[Any, Any]:
    """Apply one layer, jitted so that it is traced once for all layers of a model."""
    return Layer(config).apply({"params": params}, *arrays)  # pyright: ignore[reportReturnType]


def _rope(config: DecoderConfig, positions: Any) -> Any:
    frequencies = attention.rope_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling
    )
    return attention.rope_tables(positions, frequencies)


def _forward_recomputing(
    params: Params,
    config: DecoderConfig,
    tokens: Any,
    positions: Any,
    ends: Any,
    chosen: Any,
    gather: Gather,
) -> Any:
    """Run `forward` without a cache, keeping only each layer's input for the backward pass.

    On a CPU this is a scan over stacked weights. Without the scan, XLA on a CPU moves the
    recomputations to the front, where they save nothing: 3.4 GB instead of 1.3 GB for 2,048 tokens
    of SmolLM2-135M. Other compilers leave them in place. There the stack would cost a copy of all
    weights, frozen ones too: 3.2 GiB more on each of four TPU chips for six layers of Qwen3-8B.
    """
    x = _embed(gather({"embed": params["embed"]}), config, tokens)
    rope = _rope(config, positions)
    layers = [params[f"layers_{i}"] for i in range(config.num_layers)]

    @jax.checkpoint
    def step(x: Any, layer: Params) -> tuple[Any, None]:
        return _layer(config, gather(layer), x, rope, ends, None, None, None, chosen)[0], None

    if config.scans_layers:
        x, _ = jax.lax.scan(step, x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))
    else:
        for layer in layers:
            x, _ = step(x, layer)
    return _final_norm(params, config, x)


def _embed(params: Params, config: DecoderConfig, tokens: Any) -> Any:
    found = _look_up(params["embed"]["embedding"], tokens)
    return found.astype(config.activation_dtype or found.dtype)


@jax.custom_vjp
def _look_up(table: Any, tokens: Any) -> Any:
    """Return the tokens' rows of the table. Gradients are summed in float32 for any dtype."""
    return table[tokens]


def _look_up_forward(table: Any, tokens: Any) -> tuple[Any, Any]:
    return table[tokens], (table, tokens)


def _look_up_backward(saved: Any, grad: Any) -> tuple[Any, None]:
    table, tokens = saved
    added = jnp.zeros(table.shape, jnp.float32).at[tokens].add(grad.astype(jnp.float32))
    return added.astype(table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


@functools.partial(jax.jit, static_argnums=(0, 2))
def init_params(config: DecoderConfig, key: Any, dtype: Any = jnp.float32) -> Params:
    """Return random parameters: normal with standard deviation 0.02, norms 1, biases 0."""
    x, index = jnp.zeros((1, 1, config.embed_dim)), jnp.zeros((1, 1), jnp.int32)
    chosen = None if config.num_adapters is None else jnp.zeros(1, jnp.int32)
    arrays = (x, _rope(config, index), index, None, index, None, chosen)
    keys = jax.random.split(key, config.num_layers + 2)
    parts = {
        f"layers_{i}": Layer(config).init(keys[i], *arrays)["params"]
        for i in range(config.num_layers)
    }
    parts["final_norm"] = RMSNorm(config.norm_eps).init(key, x)["params"]
    table = 0.02 * jax.random.normal(keys[-1], (config.vocab_size, config.embed_dim))
    parts["embed"] = {"embedding": table}
    if not config.tie_embeddings:
        head = Linear(config.vocab_size, turned=config.turned)
        parts["head"] = head.init(keys[-2], x)["params"]
    return jax.tree.map(lambda leaf: leaf.astype(dtype), parts)


@functools.cache
def param_shapes(config: DecoderConfig) -> Params:
    """Return a tree of the parameters' shapes in float32. Do not modify it.

    All layers have the same shapes, so only one is traced.
    """
    one = replace(config, num_layers=1)
    shapes = jax.eval_shape(lambda: init_params(one, jax.random.key(0)))
    layers = {f"layers_{i}": shapes["layers_0"] for i in range(config.num_layers)}
    return shapes | layers


def forward(  # noqa: PLR0913  (the arguments are independent)
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    ends: Int[Array, "B T"] | None = None,
    cache: KVCache | None = None,
    rows: Int[Array, " B"] | None = None,
    remat: bool = False,
    gather: Gather | None = None,
    adapters: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T E"], KVCache | None]:
    """Return the hidden states after the final norm, and the cache with these tokens written.

    Without a cache, node i of a row sees node j iff `j <= i < ends[j]`, or causally without
    `ends`. `positions` then only set the rotary angles. With a cache, which may have more rows,
    row b is written to cache row `rows[b]`, by default b, at index = position. Each token sees the
    indices up to its own. A position of C or more marks padding: nothing is written, and its
    hidden state is meaningless. Donate the cache at the jit boundary.

    `remat` keeps less for the backward pass and recomputes the layers. `gather`, from
    `sharding.make_gather`, then gets one layer at a time. `adapters` is the adapter index of each
    row. Raises ValueError unless rows choose adapters exactly when the model has several.
    """
    if (config.num_adapters is None) != (adapters is None):
        raise InvalidValue(
            f"the model has num_adapters={config.num_adapters}, but adapters is "
            f"{'None' if adapters is None else 'given'}; pass an adapter index for each row if "
            "and only if the model has several",
            reason="missing" if adapters is None else "conflict",
            key="adapters",
        )
    gather = gather or (lambda params: params)
    if remat and cache is None:
        arrays = (tokens, positions, ends, adapters)
        return _forward_recomputing(params, config, *arrays, gather), None
    params = gather(params)
    x, rope, layers = _embed(params, config, tokens), _rope(config, positions), []
    for i in range(config.num_layers):
        cached = None if cache is None else cache.layers[i]
        arrays = (x, rope, ends, cached, positions, rows, adapters)
        x, cached = _layer(config, params[f"layers_{i}"], *arrays)
        layers.append(cached)
    x = _final_norm(params, config, x)
    return x, None if cache is None else KVCache(tuple(layers))


def _final_norm(params: Params, config: DecoderConfig, x: Any) -> Any:
    return RMSNorm(config.norm_eps).apply({"params": params["final_norm"]}, x)


def unembed(
    params: Params, config: DecoderConfig, hidden: Float[Array, "*rows E"]
) -> Float[Array, "*rows V"]:
    """Return float32 logits."""
    if config.turned:
        tied = config.tie_embeddings
        kernel = params["embed"]["embedding"] if tied else params["head"]["kernel_t"]
        return matmul_turned(hidden, kernel.astype(hidden.dtype))
    if config.tie_embeddings:
        kernel, axis = params["embed"]["embedding"], 1
    else:
        kernel, axis = params["head"]["kernel"], 0
    if config.activation_dtype:  # JAX's own rule would sum the gradient in bfloat16
        return matmul(hidden, kernel, axis)
    return product(hidden, kernel, (hidden.ndim - 1, axis))
