"""Decoder of any tuple of blocks, for training, prefill and decode.

Parameters are a plain nested dict with one subtree per layer, so that a decode step reads each
weight in place:

    embed/embedding [V, E]   final_norm/scale [E]   head/kernel [E, V] unless embeddings are tied
    layers_0, layers_1, ...
        those of the layer's mixer, of its MLP and of its norms (blocks/)
        .../lora_a [in, rank], lora_b [rank, out] next to kernels with an adapter (lora.py);
        [N, in, rank], [N, rank, out] if the rows of a batch choose among N adapters

For decoding on a CPU, each kernel [in, out] becomes a kernel_t [out, in] (blocks/matmul.py). For
decoding on a GPU, `layers` has the weights of all layers stacked by kind, each leaf [L, ...]: the
host passes every array to every program, which takes it longer than a small model's layer takes the
GPU.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lightning_jax.errors import InvalidValue
from lightning_jax.models.attention import attention
from lightning_jax.models.attention.attention import RopeTables
from lightning_jax.models.attention.kv_cache import KVCache, LayerCache
from lightning_jax.models.blocks.experts import ROUTER, ROUTES
from lightning_jax.models.blocks.layer import Layer
from lightning_jax.models.blocks.matmul import keep_in_loop, matmul, matmul_turned, product
from lightning_jax.models.blocks.parts import Hidden, LayerInputs, Linear, RMSNorm
from lightning_jax.models.config import RematKind
from lightning_jax.models.shape import DecoderConfig, DecoderShape, LongRope, Rope

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
# Gathers weights for use: gather(params) of a whole model or a part, gather(params, i) of layer i.
Gather = Callable[..., Params]


class Routes(NamedTuple):
    """Choices of the routers of L layers with experts."""

    ids: Int[Array, "L B T k"]  # of the experts, the one with the largest weight first
    entropy: Float[Array, "L B T"]  # of the router's distribution, in nats


def _keep(params: Params, layer: int | None = None) -> Params:
    """Return weights that are gathered already."""
    return params


def stack_layers(params: Params) -> Params:
    """Return the weights with those of all layers stacked on a first axis."""
    number = sum(name.startswith(LAYER) for name in params)
    layers = [params[f"{LAYER}{i}"] for i in range(number)]
    others = {name: leaf for name, leaf in params.items() if not name.startswith(LAYER)}
    return others | {STACK: _stacked(layers)}


def _stacked(layers: Sequence[Params]) -> Params:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def layer_of(params: Params, layer: int) -> Params:
    """Return the weights of one layer. Those of a stack are a static slice, read in place."""
    if STACK in params:
        return jax.tree.map(lambda leaf: leaf[layer], params[STACK])
    return params[f"{LAYER}{layer}"]


@functools.partial(jax.jit, static_argnums=0)
def _layer(
    layer: Layer, params: Params, x: Hidden, inputs: LayerInputs, cached: LayerCache | None
) -> tuple[Hidden, LayerCache | None]:
    """Apply one layer, jitted so that it is traced once for all equal blocks of a model."""
    return layer.apply({"params": params}, x, inputs, cached)  # pyright: ignore[reportReturnType]


@functools.partial(jax.jit, static_argnums=0)
def _layer_with_routes(
    layer: Layer, params: Params, x: Hidden, inputs: LayerInputs, cached: LayerCache | None
) -> tuple[tuple[Hidden, LayerCache | None], Any]:
    """Apply one layer. Return what `_layer` does, and what its router chose."""
    result: Any = layer.apply({"params": params}, x, inputs, cached, mutable=[ROUTES])
    out, left = result
    return out, left.get(ROUTES, {}).get(ROUTER)


def _layer_of(config: DecoderConfig, index: int) -> Layer:
    return Layer(config.shape.blocks[index], config.shape.norm, config.execution)


def _ropes(shape: DecoderShape, positions: Int[Array, "B T"]) -> list[RopeTables | None]:
    """Return the tables of each layer. Equal layers share one."""
    tables: dict[tuple[Rope, int], RopeTables] = {}
    for block in shape.distinct_blocks:
        if (rope := block.mixer.rope) and (key := (rope, block.mixer.head_dim)) not in tables:
            size = rope.size or block.mixer.head_dim
            frequencies = attention.rope_frequencies(size, rope.theta, rope.scaling)
            tables[key] = _grown(attention.rope_tables(positions, frequencies), rope)
    mixers = [block.mixer for block in shape.blocks]
    return [tables[mixer.rope, mixer.head_dim] if mixer.rope else None for mixer in mixers]


def layer_inputs(
    shape: DecoderShape,
    positions: Int[Array, "B T"],
    ends: Int[Array, "B T"] | None,
    cache: KVCache | None,
    rows: Int[Array, " B"] | None,
    adapters: Int[Array, " B"] | None,
) -> list[LayerInputs]:
    """Return the inputs of each layer."""
    read = [cache is not None or block.mixer.window is not None for block in shape.blocks]
    return [
        LayerInputs(rope, ends, positions if is_read else None, rows, adapters)
        for rope, is_read in zip(_ropes(shape, positions), read, strict=True)
    ]


def _grown(tables: RopeTables, rope: Rope) -> RopeTables:
    """Return the tables times the factor of the rope, if it has one."""
    if not isinstance(rope.scaling, LongRope):
        return tables
    cos, sin = tables
    return cos * rope.scaling.attention_factor, sin * rope.scaling.attention_factor


def _forward_recomputing(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "B T"],
    inputs: Sequence[LayerInputs],
    remat: RematKind,
    gather: Gather,
) -> Hidden:
    """Run `forward` without a cache, keeping each layer's input and what `KEPT` names.

    On a CPU this is a scan over stacked weights, of one period of the blocks at a time. Without it,
    XLA on a CPU moves the recomputations to the front, where they save nothing: 3.4 GB instead of
    1.3 GB for 2,048 tokens of SmolLM2-135M. Other compilers leave them in place. There the stack
    would cost a copy of all weights, frozen ones too: 3.2 GiB more on each of four TPU chips for
    six layers of Qwen3-8B.
    """
    x = _embed(gather({"embed": params["embed"]}), config, tokens)
    shape, policy = config.shape, jax.checkpoint_policies.save_only_these_names(*KEPT[remat])

    def apply(index: int, x: Hidden, layer: Params) -> Hidden:
        @functools.partial(jax.checkpoint, policy=policy)
        def step(x: Hidden, layer: Params) -> Hidden:
            return _layer(_layer_of(config, index), gather(layer, index), x, inputs[index], None)[0]

        return step(x, layer)

    def apply_period(x: Hidden, layers: Sequence[Params]) -> tuple[Hidden, None]:
        for index, layer in enumerate(layers):
            x = apply(index, x, layer)
        return x, None

    done = 0
    if config.execution.scans_layers:
        period = shape.period
        done = shape.num_layers // period * period
        layers = [layer_of(params, i) for i in range(done)]
        x, _ = jax.lax.scan(apply_period, x, [_stacked(layers[i::period]) for i in range(period)])
    for index in range(done, shape.num_layers):
        x = apply(index, x, layer_of(params, index))
    return _final_norm(params, config, x)


def _embed(params: Params, config: DecoderConfig, tokens: Int[Array, "B T"]) -> Hidden:
    x = _look_up(jnp.asarray(params["embed"]["embedding"]), tokens)
    scale = jnp.asarray(config.shape.embed_scale, x.dtype)
    x = x.astype(config.execution.activation_dtype or x.dtype)
    return x if config.shape.embed_scale == 1.0 else x * scale.astype(x.dtype)


@jax.custom_vjp
def _look_up(table: Table, tokens: Int[Array, "B T"]) -> Hidden:
    """Return the tokens' rows of the table. Gradients are summed in float32 for any dtype.

    To read rows of a bfloat16 table, XLA on a CPU first converts the table to float32.
    """
    return keep_in_loop(table, tokens)[tokens]


def _look_up_forward(
    table: Table, tokens: Int[Array, "B T"]
) -> tuple[Hidden, tuple[Table, Int[Array, "B T"]]]:
    return _look_up(table, tokens), (table, tokens)


def _look_up_backward(saved: tuple[Table, Int[Array, "B T"]], grad: Hidden) -> tuple[Table, None]:
    table, tokens = saved
    added = jnp.zeros(table.shape, jnp.float32).at[tokens].add(grad.astype(jnp.float32))
    return added.astype(table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


@functools.partial(jax.jit, static_argnums=(0, 2))
def init_params(config: DecoderConfig, key: Any, dtype: Any = jnp.float32) -> Params:
    """Return random parameters: normal with standard deviation 0.02, norms 1, biases 0.

    A norm's scale is what must be added to its offset.
    """
    shape, execution = config.shape, config.execution
    x, index = jnp.zeros((1, 1, shape.embed_dim)), jnp.zeros((1, 1), jnp.int32)
    chosen = None if execution.num_adapters is None else jnp.zeros(1, jnp.int32)
    keys = jax.random.split(key, shape.num_layers + 2)
    parts = {}
    for i, inputs in enumerate(layer_inputs(shape, index, index, None, None, chosen)):
        parts[f"{LAYER}{i}"] = _layer_of(config, i).init(keys[i], x, inputs, None)["params"]
    parts["final_norm"] = RMSNorm(shape.norm).init(key, x)["params"]
    table = 0.02 * jax.random.normal(keys[-1], (shape.vocab_size, shape.embed_dim))
    parts["embed"] = {"embedding": table}
    if not shape.tie_embeddings:
        head = Linear(shape.vocab_size, turned=execution.turned)
        parts["head"] = head.init(keys[-2], x)["params"]
    return jax.tree.map(lambda leaf: leaf.astype(dtype), parts)


@functools.cache
def param_shapes(config: DecoderConfig) -> Params:
    """Return a tree of the parameters' shapes in float32. Do not modify it.

    Equal blocks have the same shapes, so only one of them is traced.
    """
    blocks = config.shape.distinct_blocks
    few = config.with_shape(blocks=blocks)
    shapes = jax.eval_shape(lambda: init_params(few, jax.random.key(0)))
    by_block = {block: shapes.pop(f"{LAYER}{i}") for i, block in enumerate(blocks)}
    return shapes | {f"{LAYER}{i}": by_block[b] for i, b in enumerate(config.shape.blocks)}


@functools.cache
def can_stack(config: DecoderConfig) -> bool:
    """Return whether all layers have parameters of the same shapes."""
    shapes = param_shapes(config)
    first = layer_of(shapes, 0)
    return all(layer_of(shapes, i) == first for i in range(config.shape.num_layers))


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
    `ends`. `positions` then only set the rotary angles and, as depths in the trees, the windows.
    With a cache, which may have more rows, row b is written to cache row `rows[b]`, by default b,
    at index = position. Each token sees the indices up to its own. A position of C or more marks
    padding: nothing is written, and its hidden state is meaningless. Donate the cache at the jit
    boundary.

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
    gather = gather or _keep
    inputs = layer_inputs(config.shape, positions, ends, cache, rows, adapters)
    if remat != "none" and cache is None:
        return _forward_recomputing(params, config, tokens, inputs, remat, gather), None
    return _forward_in_turn(gather(params), config, tokens, inputs, cache, _layer)


def forward_routes(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    ends: Int[Array, "B T"] | None = None,
    cache: KVCache | None = None,
    gather: Gather | None = None,
    adapters: Int[Array, " B"] | None = None,
) -> tuple[Routes, KVCache | None]:
    """Return what the routers choose for each token, without a gradient. See `forward`."""
    routes: list[dict[str, Any]] = []
    inputs = layer_inputs(config.shape, positions, ends, cache, None, adapters)

    def apply(*arguments: Any) -> tuple[Hidden, LayerCache | None]:
        result, chosen = _layer_with_routes(*arguments)
        if chosen is not None:
            routes.append(chosen)
        return result

    params = (gather or _keep)(params)
    _, cache = _forward_in_turn(params, config, tokens, inputs, cache, apply)
    ids, entropy = (jnp.stack([one[name][0] for one in routes]) for name in ("ids", "entropy"))
    return Routes(ids, entropy), cache


def _forward_in_turn(
    params: Params,
    config: DecoderConfig,
    tokens: Int[Array, "B T"],
    inputs: Sequence[LayerInputs],
    cache: KVCache | None,
    apply: Callable[..., tuple[Hidden, Any]],
) -> tuple[Hidden, KVCache | None]:
    """Run `forward` with gathered weights, applying one layer after another."""
    x, layers = _embed(params, config, tokens), list(cache.layers) if cache else []
    for i, of_layer in enumerate(inputs):
        weights, layer = layer_of(params, i), _layer_of(config, i)
        if cache is None:
            x, _ = apply(layer, weights, x, of_layer, None)
            continue
        place = i // cache.stacked
        of_layer = of_layer._replace(rows=cache.rows_of(i, of_layer.rows, len(tokens)))
        x, layers[place] = apply(layer, weights, x, of_layer, layers[place])
    x = _final_norm(params, config, x)
    return x, None if cache is None else replace(cache, layers=tuple(layers))


def _final_norm(params: Params, config: DecoderConfig, x: Hidden) -> Hidden:
    norm: Any = RMSNorm(config.shape.norm).apply({"params": params["final_norm"]}, x)
    return norm


def unembed(
    params: Params, config: DecoderConfig, hidden: Float[Array, "*rows E"]
) -> Float[Array, "*rows V"]:
    """Return float32 logits."""
    logits = _products_with_head(params, config, hidden)
    divisor = config.shape.logit_divisor
    return logits if divisor == 1.0 else logits / divisor


def _products_with_head(
    params: Params, config: DecoderConfig, hidden: Float[Array, "*rows E"]
) -> Float[Array, "*rows V"]:
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
