"""Rotary positions, attention in a row of tokens, and attention to the key/value cache."""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lightning_jax.models.blockwise import ENDLESS, MASKED, attend_blocks

_SMALL = 128 * 128  # query-key pairs up to which one block is all
_DECODE_PART = 256  # cache entries that a CPU's decode step takes at once


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretch of slow rotary frequencies, for longer contexts than first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float[Array, " F"]:
    """Radians per position of each of the head_dim / 2 rotated pairs.

    Wavelengths above `original_max_positions / low_freq_factor` tokens turn `factor` times slower,
    those below `original_max_positions / high_freq_factor` stay, those between are blended.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = jnp.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_tables(
    positions: Int[Array, "B T"], frequencies: Float[Array, " F"]
) -> tuple[Float[Array, "B T 1 F"], Float[Array, "B T 1 F"]]:
    """Cosine and sine of every angle, float32, made once and used by all layers."""
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T 1 F"], sin: Float[Array, "B T 1 F"]
) -> Float[Array, "B T N D"]:
    """`x` turned by its position; element i pairs with element i + D/2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)


def attend_tree(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    ends: Int[Array, "B T"] | None,
) -> Float[Array, "B T H D"]:
    """Attention in a row: node i sees node j iff `j <= i < ends[j]`; causal without `ends`."""
    index = jnp.broadcast_to(jnp.arange(queries.shape[1]), queries.shape[:2])
    ends = jnp.full(queries.shape[:2], ENDLESS) if ends is None else ends
    return _attend(queries, keys, values, index, ends)


class CacheView(NamedTuple):
    """Which part of the cache the tokens of a call write and read."""

    positions: Any  # int32 [B, T]
    attend_len: int | None  # cache entries that are read; None: all


def write_rows(
    cache: Float[Array, "S C K D"], new: Float[Array, "B T K D"], positions: Int[Array, "B T"]
) -> Float[Array, "S C K D"]:
    """The cache with `new` at `positions` of its first B rows; positions outside 0..C-1 write
    nothing.
    """
    rows = jnp.arange(new.shape[0])[:, None]
    # A negative index would count from the end.
    target = jnp.where(positions < 0, cache.shape[1], positions)
    return cache.at[rows, target].set(new.astype(cache.dtype), mode="drop")


def attend_cache(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "S C K D"],
    values: Float[Array, "S C K D"],
    view: CacheView,
) -> Float[Array, "B T H D"]:
    """Attention to the entries of the cache's first B rows, at indices up to each token's own
    position.
    """
    keys, values = keys[: queries.shape[0]], values[: queries.shape[0]]
    full = keys.shape[1]
    length = full if view.attend_len is None else min(view.attend_len, full)
    # Padding sees index 0, so that it does not make real queries walk blocks that are empty.
    index = jnp.where(view.positions < full, view.positions, 0)
    if queries.shape[1] == 1:
        return jax.lax.platform_dependent(
            *(queries, keys, values, index),
            cpu=functools.partial(_attend_one_on_cpu, length=length),
            default=functools.partial(_attend_endless, length=length),
        )
    return _attend_endless(queries, keys, values, index, length)


def _attend_endless(queries: Any, keys: Any, values: Any, index: Any, length: int) -> Any:
    ends = jnp.full((keys.shape[0], length), ENDLESS)
    return _attend(queries, keys[:, :length], values[:, :length], index, ends)


def _attend(queries: Any, keys: Any, values: Any, index: Any, ends: Any) -> Any:
    """Query i sees key j iff `j <= index[i] < ends[j]`."""
    length = keys.shape[1]
    if queries.shape[1] > 1 and queries.shape[1] * length > _SMALL:
        return attend_blocks(queries, keys, values, index, ends)
    key = jnp.arange(length)[None, None, :]
    seen = (key <= index[:, :, None]) & (index[:, :, None] < ends[:, None, :])
    return attend_masked(queries, keys, values, seen)


def attend_masked(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "B C K D"],
    values: Float[Array, "B C K D"],
    seen: Bool[Array, "B T C"],
) -> Float[Array, "B T H D"]:
    """Softmax attention with all scores at once; query head h reads key head h // (H / K)."""
    rows, length, heads, size = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(rows, length, kv_heads, heads // kv_heads, size) * size**-0.5
    scores = jnp.einsum("btkgd,bckd->bkgtc", grouped, keys, preferred_element_type=jnp.float32)
    weights = _softmax(scores, seen[:, None, None, :, :])
    out = jnp.einsum("bkgtc,bckd->btkgd", weights.astype(values.dtype), values)
    return out.reshape(queries.shape)


def _attend_one_on_cpu(queries: Any, keys: Any, values: Any, index: Any, length: int) -> Any:
    """One query a row, as products over [C, K*D] with the other heads' part of each query zero.

    It computes K times too much, but XLA's CPU compiler copies the whole cache to bring the head
    axis to the front for anything else, and memory is what decoding waits for. A part of the cache
    is copied too, so we take small parts that stay in the processor's, or nearly all as it lies.
    """
    rows, _, heads, size = queries.shape
    full, kv_heads = keys.shape[1:3]
    own = jnp.eye(kv_heads, dtype=queries.dtype)[None, :, None, :, None]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, 1, size) * (own * size**-0.5)
    spread = grouped.reshape(rows, heads, kv_heads * size)
    step, length = (full, full) if 4 * length > 3 * full else (_DECODE_PART, length)
    parts = [slice(start, min(start + step, length)) for start in range(0, length, step)]
    flat_keys, flat_values = (
        [x[:, part].reshape(rows, -1, kv_heads * size) for part in parts] for x in (keys, values)
    )
    form, wide = "bhx,bcx->bhc", jnp.float32
    scores = [jnp.einsum(form, spread, key, preferred_element_type=wide) for key in flat_keys]
    seen = (jnp.arange(length)[None, :] <= index)[:, None, :]
    weights = _softmax(jnp.concatenate(scores, axis=-1), seen).astype(values.dtype)
    outs = [
        jnp.einsum("bhc,bcx->bhx", weights[:, :, part], value, preferred_element_type=wide)
        for part, value in zip(parts, flat_values, strict=True)
    ]
    out = sum(outs[1:], outs[0]).reshape(rows, kv_heads, heads // kv_heads, kv_heads, size) * own
    return out.sum(axis=3).reshape(queries.shape).astype(queries.dtype)


def _softmax(scores: Any, seen: Any) -> Any:
    return jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
