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

For decoding on a CPU, each kernel [in, out] becomes a kernel_t [out, in] (matmul.py). For decoding
on a GPU, `layers` has the weights of all layers stacked by kind, each leaf [L, ...]: the host
passes every array to every program, which takes it longer than a small model's layer takes the GPU.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from lightning_jax.errors import InvalidValue
from lightning_jax.models.attention import attention
from lightning_jax.models.attention.attention import RopeTables
from lightning_jax.models.attention.kv_cache import (
    KVCache,
    LayerCache,
    Rows,
    attend_cache,
    write_cache,
)
from lightning_jax.models.config import LoraConfig, RematKind
from lightning_jax.models.matmul import matmul, matmul_turned, product
from lightning_jax.models.shape import DecoderConfig, DecoderShape

Hidden = Float[Array, "B T E"]
Table = Float[Array, "V E"]
Params = dict[str, Any]
# Results of a layer, beside its input, that are kept for its backward pass. Each kind of `remat`
# saves memory of the one before. q, k and v are named before rotary positions and norms.
KEPT: dict[RematKind, tuple[str, ...]] = {
    "mlp": (*attention.RESULTS, "q", "k", "v", "gate", "up"),
    "attention": attention.RESULTS,
    "full": (),
}
STACK, LAYER = "layers", "layers_"  # paths of the stacked layers, and of single ones with a number
Gather = Callable[[Params], Params]  # gathers all weights, or those of one layer, for use


def stack_layers(params: Params) -> Params:
    """Return the weights with those of all layers stacked on a first axis."""
    number = sum(name.startswith(LAYER) for name in params)
    layers = [params[f"{LAYER}{i}"] for i in range(number)]
    others = {name: leaf for name, leaf in params.items() if not name.startswith(LAYER)}
    return others | {STACK: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def layer_of(params: Params, layer: int) -> Params:
    """Return the weights of one layer. Those of a stack are a static slice, read in place."""
    if STACK in params:
        return jax.tree.map(lambda leaf: leaf[layer], params[STACK])
    return params[f"{LAYER}{layer}"]


class LayerInputs(NamedTuple):
    """Inputs of all layers of a pass, besides weights, hidden states and caches."""

    rope: RopeTables
    ends: Int[Array, "B T"] | None  # without a cache: see `forward`
    positions: Int[Array, "B T"] | None  # with a cache: where the row's tokens are written
    rows: Rows | None  # with a cache: its row for each row of the batch
    adapters: Int[Array, " B"] | None  # index for each row; None: the model has at most one


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

    def _adapter(
        self, x: Float[Array, "B T _"], lora: LoraConfig, chosen: Int[Array, " B"] | None
    ) -> Float[Array, "B T _"]:
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
        self, x: Hidden, inputs: LayerInputs, cached: LayerCache | None
    ) -> tuple[Hidden, LayerCache | None]:
        shape, adapters = self.config.shape, inputs.adapters
        h = RMSNorm(shape.norm_eps, name="attn_norm")(x)
        queries, keys, values = self._project(h, inputs)
        if cached is None:
            mixed = attention.attend_tree(queries, keys, values, inputs.ends)
        else:
            assert inputs.positions is not None, "tokens are written at their positions"
            cached = write_cache(cached, keys, values, inputs.positions, inputs.rows)
            mixed = attend_cache(queries, cached, inputs.positions, inputs.rows)
        mixed = mixed.reshape(*mixed.shape[:2], shape.num_heads * shape.head_dim)
        x = x + self._linear("o", shape.embed_dim)(mixed, adapters)
        h = RMSNorm(shape.norm_eps, name="mlp_norm")(x)
        gate, up = (
            checkpoint_name(self._linear(name, shape.mlp_dim)(h, adapters), name)
            for name in ("gate", "up")
        )
        return x + self._linear("down", shape.embed_dim)(nn.silu(gate) * up, adapters), cached

    def _linear(self, name: str, features: int, *, bias: bool = False) -> Linear:
        execution = self.config.execution
        lora = execution.lora
        adapter = lora if lora is not None and name in lora.targets else None
        return Linear(features, bias, adapter, execution.num_adapters, execution.turned, name=name)

    def _project(
        self, h: Hidden, inputs: LayerInputs
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Return queries, keys and values, with rotary positions applied."""
        shape = self.config.shape
        heads_of = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
        parts = {}
        for name, heads in heads_of.items():
            linear = self._linear(name, heads * shape.head_dim, bias=shape.qkv_bias)
            flat = checkpoint_name(linear(h, inputs.adapters), name)
            parts[name] = flat.reshape(*flat.shape[:2], heads, shape.head_dim)
        if shape.qk_norm:
            parts["q"] = RMSNorm(shape.norm_eps, name="q_norm")(parts["q"])
            parts["k"] = RMSNorm(shape.norm_eps, name="k_norm")(parts["k"])
        queries, keys = (attention.rotate(parts[name], *inputs.rope) for name in ("q", "k"))
        return queries, keys, parts["v"]


@functools.partial(jax.jit, static_argnums=0)
def _layer(
    config: DecoderConfig, params: Params, x: Hidden, inputs: LayerInputs, cached: LayerCache | None
) -> tuple[Hidden, LayerCache | None]:
    """Apply one layer, jitted so that it is traced once for all layers of a model."""
    return Layer(config).apply({"params": params}, x, inputs, cached)  # pyright: ignore[reportReturnType]


def _rope(shape: DecoderShape, positions: Int[Array, "B T"]) -> RopeTables:
    frequencies = attention.rope_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    return attention.rope_tables(positions, frequencies)


def _forward_recomputing(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "B T"],
    inputs: LayerInputs,
    remat: RematKind,
    gather: Gather,
) -> Hidden:
    """Run `forward` without a cache, keeping each layer's input and what `KEPT` names.

    On a CPU this is a scan over stacked weights. Without the scan, XLA on a CPU moves the
    recomputations to the front, where they save nothing: 3.4 GB instead of 1.3 GB for 2,048 tokens
    of SmolLM2-135M. Other compilers leave them in place. There the stack would cost a copy of all
    weights, frozen ones too: 3.2 GiB more on each of four TPU chips for six layers of Qwen3-8B.
    """
    x = _embed(gather({"embed": params["embed"]}), config, tokens)

    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*KEPT[remat])
    )
    def step(x: Hidden, layer: Params) -> tuple[Hidden, None]:
        return _layer(config, gather(layer), x, inputs, None)[0], None

    if config.execution.scans_layers:
        x, _ = jax.lax.scan(step, x, stack_layers(params)[STACK])
    else:
        for i in range(config.shape.num_layers):
            x, _ = step(x, layer_of(params, i))
    return _final_norm(params, config, x)


def _embed(params: Params, config: DecoderConfig, tokens: Int[Array, "B T"]) -> Hidden:
    x = _look_up(jnp.asarray(params["embed"]["embedding"]), tokens)
    return x.astype(config.execution.activation_dtype or x.dtype)


@jax.custom_vjp
def _look_up(table: Table, tokens: Int[Array, "B T"]) -> Hidden:
    """Return the tokens' rows of the table. Gradients are summed in float32 for any dtype."""
    return table[tokens]


def _look_up_forward(
    table: Table, tokens: Int[Array, "B T"]
) -> tuple[Hidden, tuple[Table, Int[Array, "B T"]]]:
    return table[tokens], (table, tokens)


def _look_up_backward(saved: tuple[Table, Int[Array, "B T"]], grad: Hidden) -> tuple[Table, None]:
    table, tokens = saved
    added = jnp.zeros(table.shape, jnp.float32).at[tokens].add(grad.astype(jnp.float32))
    return added.astype(table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


@functools.partial(jax.jit, static_argnums=(0, 2))
def init_params(config: DecoderConfig, key: Any, dtype: Any = jnp.float32) -> Params:
    """Return random parameters: normal with standard deviation 0.02, norms 1, biases 0."""
    shape, execution = config.shape, config.execution
    x, index = jnp.zeros((1, 1, shape.embed_dim)), jnp.zeros((1, 1), jnp.int32)
    chosen = None if execution.num_adapters is None else jnp.zeros(1, jnp.int32)
    inputs = LayerInputs(_rope(shape, index), index, None, None, chosen)
    keys = jax.random.split(key, shape.num_layers + 2)
    parts = {
        f"layers_{i}": Layer(config).init(keys[i], x, inputs, None)["params"]
        for i in range(shape.num_layers)
    }
    parts["final_norm"] = RMSNorm(shape.norm_eps).init(key, x)["params"]
    table = 0.02 * jax.random.normal(keys[-1], (shape.vocab_size, shape.embed_dim))
    parts["embed"] = {"embedding": table}
    if not shape.tie_embeddings:
        head = Linear(shape.vocab_size, turned=execution.turned)
        parts["head"] = head.init(keys[-2], x)["params"]
    return jax.tree.map(lambda leaf: leaf.astype(dtype), parts)


@functools.cache
def param_shapes(config: DecoderConfig) -> Params:
    """Return a tree of the parameters' shapes in float32. Do not modify it.

    All layers have the same shapes, so only one is traced.
    """
    one = config.with_shape(num_layers=1)
    shapes = jax.eval_shape(lambda: init_params(one, jax.random.key(0)))
    layers = {f"layers_{i}": shapes["layers_0"] for i in range(config.shape.num_layers)}
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
    remat: RematKind = "none",
    gather: Gather | None = None,
    adapters: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T E"], KVCache | None]:
    """Return the hidden states after the final norm, and the cache with these tokens written.

    Without a cache, node i of a row sees node j iff `j <= i < ends[j]`, or causally without
    `ends`. `positions` then only set the rotary angles. With a cache, which may have more rows,
    row b is written to cache row `rows[b]`, by default b, at index = position. Each token sees the
    indices up to its own. A position of C or more marks padding: nothing is written, and its
    hidden state is meaningless. Donate the cache at the jit boundary.

    `remat` other than none keeps less for the backward pass and recomputes the rest (`KEPT`).
    `gather`, from `sharding.make_gather`, then gets one layer at a time. `adapters` is the adapter
    index of each row. Raises ValueError unless rows choose adapters exactly when the model has
    several.
    """
    num_adapters = config.execution.num_adapters
    if (num_adapters is None) != (adapters is None):
        raise InvalidValue(
            f"the model has num_adapters={num_adapters}, but adapters is "
            f"{'None' if adapters is None else 'given'}; pass an adapter index for each row if "
            "and only if the model has several",
            reason="missing" if adapters is None else "conflict",
            key="adapters",
        )
    gather = gather or (lambda params: params)
    places = None if cache is None else positions
    inputs = LayerInputs(_rope(config.shape, positions), ends, places, rows, adapters)
    if remat != "none" and cache is None:
        return _forward_recomputing(params, config, tokens, inputs, remat, gather), None
    params = gather(params)
    x, layers = _embed(params, config, tokens), list(cache.layers) if cache else []
    for i in range(config.shape.num_layers):
        layer = layer_of(params, i)
        if cache is None:
            x, _ = _layer(config, layer, x, inputs, None)
            continue
        place = i // cache.stacked
        of_layer = inputs._replace(rows=cache.rows_of(i, rows, len(tokens)))
        x, layers[place] = _layer(config, layer, x, of_layer, layers[place])
    x = _final_norm(params, config, x)
    return x, None if cache is None else replace(cache, layers=tuple(layers))


def _final_norm(params: Params, config: DecoderConfig, x: Hidden) -> Hidden:
    norm: Any = RMSNorm(config.shape.norm_eps).apply({"params": params["final_norm"]}, x)
    return norm


def unembed(
    params: Params, config: DecoderConfig, hidden: Float[Array, "*rows E"]
) -> Float[Array, "*rows V"]:
    """Return float32 logits."""
    tied = config.shape.tie_embeddings
    if config.execution.turned:
        kernel = params["embed"]["embedding"] if tied else params["head"]["kernel_t"]
        return matmul_turned(hidden, kernel.astype(hidden.dtype))
    if tied:
        kernel, axis = params["embed"]["embedding"], 1
    else:
        kernel, axis = params["head"]["kernel"], 0
    if config.execution.activation_dtype:  # JAX's own rule would sum the gradient in bfloat16
        return matmul(hidden, kernel, axis)
    return product(hidden, kernel, (hidden.ndim - 1, axis))
