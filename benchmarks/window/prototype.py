"""Decode steps to measure: the engine's own, with branches, and a prototype with few arguments.

The merged step keeps the keys of all layers in one array and their values in another, with row =
layer * S + slot. Weights are stacked by kind, with q, k and v in one kernel and gate and up in
another. The host hands in one table of the slots' settings and reads one array of results.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from lightning_jax.engine import sampling
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device import programs
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.device.table import SlotTable, pack_sampled, read_rows
from lightning_jax.engine.sampling import Sampled, Work
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.attention import attention, flash_cache
from lightning_jax.models.attention.kv_cache import (
    LayerCache,
    attend_cache,
    row_length,
    write_cache,
)
from lightning_jax.models.matmul import matmul
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Params, RMSNorm, param_shapes, unembed
from lightning_jax.types import Leaf
from window.shapes import shape_of

Options = Mapping[str, str]  # of XLA's compiler
Dispatch = Callable[[], Any]  # starts the next step and returns its result on the device


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MergedState:
    """Cache and last tokens of S slots."""

    keys: Leaf  # [L*S, K, C, D]
    values: Leaf  # [L*S, K, C, D]
    tokens: Leaf  # int32 [S]


def init_merged_state(
    config: DecoderConfig, slots: int, length: int, dtype: Any, platform: str
) -> MergedState:
    """Return a state of zeros for rows of `length` tokens."""
    width = flash_cache.kernel_width(platform, config.shape.head_dim)
    rows = config.shape.num_layers * slots
    shape = rows, config.shape.num_kv_heads, row_length(length, platform), width
    keys, values = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    return MergedState(keys, values, jnp.zeros(slots, jnp.int32))


def merge_weights(params: Params, config: DecoderConfig) -> Params:
    """Return the weights stacked by kind, [L, ...], from those of a model without adapters."""
    layers = [params[f"layers_{i}"] for i in range(config.shape.num_layers)]

    def stack(*names: str, leaf: str = "kernel") -> Any:
        parts = [[layer[name][leaf] for name in names] for layer in layers]
        return jnp.stack([jnp.concatenate(part, axis=-1) for part in parts])

    stacked = {
        "attn_norm": stack("attn_norm", leaf="scale"),
        "qkv": stack("q", "k", "v"),
        "o": stack("o"),
        "mlp_norm": stack("mlp_norm", leaf="scale"),
        "gate_up": stack("gate", "up"),
        "down": stack("down"),
    }
    if config.shape.qkv_bias:
        stacked["qkv_bias"] = stack("q", "k", "v", leaf="bias")
    if config.shape.qk_norm:
        stacked |= {name: stack(name, leaf="scale") for name in ("q_norm", "k_norm")}
    unchanged = {name: params[name] for name in ("embed", "final_norm", "head") if name in params}
    return {"layers": stacked, **unchanged}


def merged_step(
    weights: Params, state: MergedState, table: Int32[Array, "S 12"], *, config: DecoderConfig
) -> tuple[MergedState, Int32[Array, "4 S"]]:
    """Feed the next token of each active slot and sample one token after it.

    The result is that of the engine's own step. Donate the state.
    """
    slots = table.shape[0]
    settings = read_rows(table)
    tokens = jnp.where(settings.is_first, settings.token, state.tokens)
    # A position past the end writes nothing.
    at = jnp.where(settings.is_active, settings.position, state.keys.shape[2])[:, None]
    frequencies = attention.rope_frequencies(
        config.shape.head_dim, config.shape.rope_theta, config.shape.rope_scaling
    )
    rope = attention.rope_tables(at, frequencies)
    x = weights["embed"]["embedding"][tokens][:, None]
    cached = LayerCache((state.keys,), (state.values,), whole=True)
    for i in range(config.shape.num_layers):
        layer = {name: leaf[i] for name, leaf in weights["layers"].items()}
        rows = np.arange(i * slots, (i + 1) * slots, dtype=np.int32)  # a constant, so no kernel
        x, cached = _merged_layer(config, layer, x, rope, cached, at, rows)
    hidden = _norm(config, weights["final_norm"]["scale"], x)[:, 0]
    logits = unembed(weights, config, hidden)
    keys = jax.vmap(jax.random.fold_in)(
        jax.random.wrap_key_data(settings.key, impl="threefry2x32"), settings.count
    )
    temperature = jnp.where(settings.is_active, settings.temperature, 0.0)
    filters = settings.top_p, settings.top_k, settings.min_p
    sampled = sampling.sample(logits, keys, temperature, *filters, work=Work())
    last = jnp.where(settings.is_active, sampled.tokens, tokens)
    state = MergedState(cached.keys[0], cached.values[0], last)
    return state, pack_sampled(sampled)


@functools.partial(jax.jit, static_argnums=0)
def _merged_layer(
    config: DecoderConfig, layer: Params, x: Any, rope: Any, cached: Any, at: Any, rows: Any
) -> tuple[Any, LayerCache]:
    heads, kv_heads, size = config.shape.num_heads, config.shape.num_kv_heads, config.shape.head_dim
    flat = matmul(_norm(config, layer["attn_norm"], x), layer["qkv"])
    if config.shape.qkv_bias:
        flat = flat + layer["qkv_bias"][None, None]
    split = flat.reshape(*flat.shape[:2], heads + 2 * kv_heads, size)
    queries, keys, values = jnp.split(split, (heads, heads + kv_heads), axis=2)
    if config.shape.qk_norm:
        queries = _norm(config, layer["q_norm"], queries)
        keys = _norm(config, layer["k_norm"], keys)
    queries, keys = attention.rotate(queries, *rope), attention.rotate(keys, *rope)
    cached = write_cache(cached, keys, values, at, rows)
    mixed = attend_cache(queries, cached, at, rows).reshape(*x.shape[:2], heads * size)
    x = x + matmul(mixed, layer["o"])
    gate_up = matmul(_norm(config, layer["mlp_norm"], x), layer["gate_up"])
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return x + matmul(jax.nn.silu(gate) * up, layer["down"]), cached


def _norm(config: DecoderConfig, scale: Any, x: Any) -> Any:
    return RMSNorm(config.shape.norm_eps).apply({"params": {"scale": scale}}, x)


def random_weights(shapes: Params, dtype: Any) -> Params:
    """Return random weights: kernels normal with standard deviation 0.02, norms 1, biases 0.

    One small program per shape, because one for all weights takes long to compile.
    """

    def leaf(path: Any, shape: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return jnp.ones(shape.shape, dtype)
        if "bias" in name:
            return jnp.zeros(shape.shape, dtype)
        key = jax.random.key(next(seeds))
        return _normal(key, shape.shape, jnp.dtype(dtype))

    seeds = iter(range(10**6))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return (0.02 * jax.random.normal(key, shape, dtype)).astype(dtype)


@dataclass(frozen=True)
class Workload:
    """Decode batch: all slots in use, each with about `used` tokens."""

    config: DecoderConfig
    slots: int
    max_len: int
    used: int
    repeats: int

    @property
    def first_position(self) -> int:
        """Position of the first step, so that the steps on average see `used` tokens."""
        return self.used - self.repeats - 4


def make_workload(model: str, slots: int, is_tiny: bool) -> Workload:
    """Return the workload of a model: 135m, 1.5b or 8b. If tiny, that of the tiny model."""
    if is_tiny:
        return Workload(shape_of("tiny"), slots=4, max_len=64, used=32, repeats=5)
    return Workload(shape_of(model), slots, max_len=768, used=640, repeats=30)


def engine_steps(load: Workload, options: Options | None = None) -> Dispatch:
    """Return the engine's own decode step, compiled with these options, or with its own."""
    serve = ServeConfig(slots=load.slots, max_len=load.max_len, prefill_buckets=(load.max_len,))
    engine = SlotPrograms(load.config, serve, dtype="bfloat16")
    if options is not None:
        engine._jit = functools.partial(jax.jit, compiler_options=dict(options))
        engine._compile_later()
    weights = random_weights(param_shapes(load.config), "bfloat16")
    states, table, slots = [engine.init_state()], _full_table(load), range(load.slots)

    def dispatch() -> Any:
        states[0], sampled = engine.generate(weights, states[0], table, slots, has_filters=False)
        return sampled

    return dispatch


def _full_table(load: Workload) -> SlotTable:
    table = SlotTable(load.slots)
    for slot in range(load.slots):
        table.begin(slot, 7 + slot, load.first_position, SamplingParams(), slot)
    return table


def branched_steps(load: Workload) -> Dispatch:
    """Return the engine's decode step with sampling that branches, as on a CPU."""
    dispatch = engine_steps(load)

    def sample_with_branches(*inputs: Any) -> Sampled:
        *others, _ = inputs  # the last one is the work of a program without branches
        return sampling.sample(*others)

    def dispatch_with_branches() -> Any:  # the first call traces the program
        with mock.patch.object(programs, "sample", sample_with_branches):
            return dispatch()

    first = [dispatch_with_branches]
    return lambda: first.pop()() if first else dispatch()


def merged_steps(load: Workload) -> Dispatch:
    """Return the prototype with a merged cache and merged weights."""
    config, platform = load.config, jax.default_backend()
    merge = functools.partial(merge_weights, config=config)
    weights = random_weights(jax.eval_shape(merge, param_shapes(config)), "bfloat16")
    state = init_merged_state(config, load.slots, load.max_len, "bfloat16", platform)
    table, slots = _full_table(load), range(load.slots)
    step = jax.jit(functools.partial(merged_step, config=config), donate_argnums=1)
    compiled = step.lower(weights, state, table.next_steps(())).compile()
    states = [state]

    def dispatch() -> Any:
        states[0], result = compiled(weights, states[0], table.next_steps(slots))
        result.copy_to_host_async()
        return result

    return dispatch


def bytes_per_step(load: Workload) -> float:
    """Return the bytes of weights and of used keys and values that a bfloat16 step must read."""
    config = load.config
    shapes = param_shapes(config)
    tied = config.shape.tie_embeddings
    read = shapes if tied else {k: v for k, v in shapes.items() if k != "embed"}
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(read))
    width = config.shape.num_layers * config.shape.num_kv_heads * config.shape.head_dim
    return 2.0 * (weights + 2 * load.slots * load.used * width)


STEPS: dict[str, Callable[[Workload], Dispatch]] = {
    "generate": engine_steps,
    "branched": branched_steps,
    "merged": merged_steps,
}
