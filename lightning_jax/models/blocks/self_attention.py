"""Mixer of attention: over a row of the forest, or over the KV cache.

Parameters: q/kernel [E, H*D]   k, v /kernel [E, K*D]   o/kernel [H*D, E]   q, k, v /bias (Qwen2)
q_norm, k_norm /scale [D] (Qwen3), or [H*D] and [K*D] (OLMo 2)
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from lightning_jax.models.attention import attention
from lightning_jax.models.attention.blockwise import Window
from lightning_jax.models.attention.kv_cache import LayerCache, attend_cache, write_cache
from lightning_jax.models.blocks.parts import Axes, Hidden, LayerInputs, Parts, Width
from lightning_jax.models.shape import Attention

KERNELS = ("q", "k", "v", "o")
ADAPTED = KERNELS
AXES: dict[tuple[str, str], Axes] = {
    ("q", "kernel"): ("embed", "heads"),
    ("k", "kernel"): ("embed", "kv_heads"),
    ("v", "kernel"): ("embed", "kv_heads"),
    ("o", "kernel"): ("heads", "embed"),
    ("q", "bias"): ("heads",),
    ("k", "bias"): ("kv_heads",),
    ("v", "bias"): ("kv_heads",),
}
_Projected = tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]


def over_row(spec: Attention, parts: Parts, x: Hidden, inputs: LayerInputs) -> Hidden:
    """Return each node's attention to its ancestors in the row and to itself."""
    window = None if spec.window is None else Window.of(inputs.positions, spec.window)
    projected = _project(spec, parts, x, inputs)
    return _combine(parts, x, attention.attend_tree(*projected, inputs.ends, window))


def over_cache(
    spec: Attention, parts: Parts, x: Hidden, inputs: LayerInputs, cached: LayerCache
) -> tuple[Hidden, LayerCache]:
    """Write the tokens to the cache. Return their attention to its rows, and the cache."""
    assert inputs.positions is not None, "tokens are written at their positions"
    queries, keys, values = _project(spec, parts, x, inputs)
    cached = write_cache(cached, keys, values, inputs.positions, inputs.rows)
    mixed = attend_cache(queries, cached, inputs.positions, inputs.rows, spec.window)
    return _combine(parts, x, mixed), cached


def units(spec: Attention) -> dict[str, int]:
    """Return the number of units of each logical axis that are never split."""
    return {"heads": spec.heads, "kv_heads": spec.kv_heads}


def activations(spec: Attention, embed_dim: int) -> dict[str, Width]:
    """Return what a layer keeps of one token for its backward pass, by its name in `KEPT`."""
    heads = Width("heads", spec.heads, spec.head_dim)
    keys = Width("kv_heads", spec.kv_heads, spec.head_dim)
    products = {"q": heads, "k": keys, "v": keys}
    rotated = {"rotated q": heads, "rotated k": keys}
    statistic = Width("heads", spec.heads, is_statistic=True)
    results = {"attention_out": heads, "attention_log_sums": statistic}
    return products | rotated | results


def shares(spec: Attention) -> dict[str, float]:
    """Return the share of a kernel's weights with which a token is multiplied, if not all."""
    return {}


def _project(spec: Attention, parts: Parts, x: Hidden, inputs: LayerInputs) -> _Projected:
    """Return queries, keys and values, with rotary positions applied."""
    projected = {}
    for name, heads in {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}.items():
        flat = parts.kept_linear(name, x, heads * spec.head_dim, bias=spec.bias)
        if spec.qk_norm == "projection" and name != "v":
            flat = parts.normed(f"{name}_norm", flat)
        projected[name] = flat.reshape(*flat.shape[:2], heads, spec.head_dim)
    queries, keys = projected["q"], projected["k"]
    if spec.qk_norm == "head":
        queries, keys = parts.normed("q_norm", queries), parts.normed("k_norm", keys)
    if inputs.rope is not None:
        queries, keys = (attention.rotate(part, *inputs.rope) for part in (queries, keys))
    if spec.scale is not None:  # attention itself multiplies by head_dim**-0.5
        factor = spec.scale * spec.head_dim**0.5  # which bfloat16 would round
        queries = (queries.astype(jnp.float32) * factor).astype(queries.dtype)
    return queries, keys, projected["v"]


def _combine(parts: Parts, x: Hidden, mixed: Float[Array, "B T H D"]) -> Hidden:
    return parts.linear("o", mixed.reshape(*mixed.shape[:2], -1), x.shape[-1])
