"""Attention over rows of tokens and over the key/value cache, and the rotary positions of both."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30  # finite, so that a query that sees nothing gives numbers and no NaN


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretch of the slow rotary frequencies, for longer contexts than first trained on."""

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


def attend(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "B C K D"],
    values: Float[Array, "B C K D"],
    visible: Bool[Array, "B T C"],
) -> Float[Array, "B T H D"]:
    """Softmax attention; query head h reads key head h // (H / K). Scores are float32."""
    rows, length, heads, size = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(rows, length, kv_heads, heads // kv_heads, size) * size**-0.5
    scores = jnp.einsum("btkgd,bckd->bkgtc", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None, :, :], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkgtc,bckd->btkgd", weights, values).reshape(queries.shape)


def attend_tree(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    ends: Int[Array, "B T"] | None,
) -> Float[Array, "B T H D"]:
    """Attention in a row: node i sees node j iff `j <= i < ends[j]`; without `ends`, plain causal."""
    index = jnp.arange(queries.shape[1])
    visible = (index[None, :] <= index[:, None])[None]
    if ends is not None:
        visible = visible & (index[None, :, None] < ends[:, None, :])
    visible = jnp.broadcast_to(visible, (queries.shape[0], *visible.shape[1:]))
    return attend(queries, keys, values, visible)


def write_rows(
    cache: Float[Array, "B C K D"], new: Float[Array, "B T K D"], positions: Int[Array, "B T"]
) -> Any:
    """The cache with `new` at `positions` of each row; positions outside 0..C-1 write nothing."""
    rows = jnp.arange(cache.shape[0])[:, None]
    # A negative index would count from the end.
    target = jnp.where(positions < 0, cache.shape[1], positions)
    return cache.at[rows, target].set(new.astype(cache.dtype), mode="drop")


class CacheView(NamedTuple):
    """Which part of the cache the tokens of a call write and read."""

    positions: Any  # int32 [B, T]
    attend_len: int | None  # cache entries that are read; None: all


def attend_cache(
    queries: Float[Array, "B T H D"],
    keys: Float[Array, "B C K D"],
    values: Float[Array, "B C K D"],
    view: CacheView,
) -> Float[Array, "B T H D"]:
    """Attention to the cache entries at indices up to each token's own position."""
    length = keys.shape[1] if view.attend_len is None else min(view.attend_len, keys.shape[1])
    visible = jnp.arange(length)[None, None, :] <= view.positions[:, :, None]
    return attend(queries, keys[:, :length], values[:, :length], visible)
