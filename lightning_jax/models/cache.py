"""The key/value cache: how it lies in memory, writing tokens to it, and attention to it.

A row of keys is [K, D, C] and one of values [K, C, D], so that both products of attention read them
as they lie; for any other order XLA's CPU compiler copies the whole cache every step. A row is cut
into segments, which are arrays of their own: a step that needs only the beginnings of the rows
takes only the first ones, while a slice of one array would be copied.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lightning_jax.models import flash_decode
from lightning_jax.models.blockwise import MASKED
from lightning_jax.types import Leaf

SEGMENT = 256  # tokens of the first segments; reading fewer saves next to nothing
KEY_AXIS, VALUE_AXIS = 3, 2  # of the tokens in a segment
Segments = tuple[Leaf, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of L layers: tuples of segments [S, K, D, C] and [S, K, C, D], row = slot."""

    keys: tuple[Segments, ...]
    values: tuple[Segments, ...]

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return sum(segment.shape[VALUE_AXIS] for segment in self.values[0])

    def split(self) -> "list[KVCache]":
        """One cache for each segment; `join` is the inverse."""
        keys, values = (zip(*side, strict=True) for side in (self.keys, self.values))
        return [
            KVCache(tuple((key,) for key in layers), tuple((value,) for value in others))
            for layers, others in zip(keys, values, strict=True)
        ]


def join(parts: Sequence[KVCache]) -> KVCache:
    """The cache whose rows are those of the parts, one behind the other."""

    def chain(sides: Sequence[tuple[Segments, ...]]) -> tuple[Segments, ...]:
        return tuple(tuple(itertools.chain(*layer)) for layer in zip(*sides, strict=True))

    return KVCache(chain([part.keys for part in parts]), chain([part.values for part in parts]))


def segment_lengths(length: int) -> tuple[int, ...]:
    """The segments of rows of `length` tokens: 1600 gives 256, 256, 256, 256, 512, 64.

    Long ones are half of what comes before, so that what is read is little more than what is there.
    """
    lengths: list[int] = []
    while (done := sum(lengths)) < length:
        lengths.append(min(max(SEGMENT, done // 2 // SEGMENT * SEGMENT), length - done))
    return tuple(lengths)


def segment_starts(segments: Sequence[Any]) -> list[int]:
    """The place in the row where each segment of values begins."""
    return [0, *itertools.accumulate(segment.shape[VALUE_AXIS] for segment in segments)][:-1]


def make_cache(
    *, layers: int, rows: int, length: int, kv_heads: int, head_dim: int, dtype: Any
) -> KVCache:
    """An empty cache, zeros."""
    lengths = segment_lengths(length)
    keys = [(rows, kv_heads, head_dim, size) for size in lengths]
    values = [(rows, kv_heads, size, head_dim) for size in lengths]
    return KVCache(
        keys=tuple(tuple(jnp.zeros(shape, dtype) for shape in keys) for _ in range(layers)),
        values=tuple(tuple(jnp.zeros(shape, dtype) for shape in values) for _ in range(layers)),
    )


def write_cache(
    keys: Segments,
    values: Segments,
    new_keys: Float[Array, "B T K D"],
    new_values: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    rows: Int[Array, " B"] | None = None,
) -> tuple[Segments, Segments]:
    """One layer with new tokens at `positions` of these rows, or of the first B; those outside
    write nothing.
    """
    rows = (jnp.arange(new_keys.shape[0]) if rows is None else rows)[:, None]
    written_keys, written_values = [], []
    for start, key, value in zip(segment_starts(values), keys, values, strict=True):
        # A negative index would count from the end.
        at = jnp.where(positions < start, value.shape[VALUE_AXIS], positions - start)
        new = new_keys.astype(key.dtype), new_values.astype(value.dtype)
        written_keys.append(key.at[rows, :, :, at].set(new[0], mode="drop"))
        written_values.append(value.at[rows, :, at].set(new[1], mode="drop"))
    return tuple(written_keys), tuple(written_values)


class _Part(NamedTuple):
    """Attention to one segment, before the division by the sum of weights; M queries a key head."""

    highest: Any  # float32 [B K M 1], the largest score
    total: Any  # float32 [B K M 1], the sum of exp(score - highest)
    out: Any  # float32 [B K M D]


def attend_cache(
    queries: Float[Array, "B T H D"],
    keys: Segments,
    values: Segments,
    positions: Int[Array, "B T"],
    rows: Int[Array, " B"] | None = None,
) -> Float[Array, "B T H D"]:
    """Attention to these rows, or to the first B, at indices up to each query's own position.

    Query head h reads key head h // (H / K). Segments that no query sees are skipped where there
    are several queries a row; a caller that knows better leaves them out. With one query for each
    of the first rows a TPU and a GPU run kernels of their own, which skip what a row does not see
    (flash_decode.py).
    The parts are put together as in arXiv 1805.02867.
    """
    number, length, heads, size = queries.shape
    kv_heads = values[0].shape[1]
    grouped = queries.reshape(number, length, kv_heads, heads // kv_heads, size) * size**-0.5
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(number, kv_heads, -1, size)
    grouped = grouped.astype(keys[0].dtype)  # else keys would be made the wider type of both
    end = sum(value.shape[VALUE_AXIS] for value in values)
    # Padding sees index 0, so that it does not make real queries walk segments that are empty.
    index = jnp.where(positions < end, positions, 0)
    parts = []
    for start, key, value in zip(segment_starts(values), keys, values, strict=True):
        arrays = (grouped, key, value, index - start)
        if length == 1 and rows is None:
            parts.append(_attend_token(*arrays))
        elif start == 0:
            parts.append(_attend_rows(*arrays, rows))
        else:
            parts.append(_attend_if(index.max() >= start, *arrays, rows))
    out = _combine(parts).reshape(number, kv_heads, heads // kv_heads, length, size)
    return out.transpose(0, 3, 1, 2, 4).reshape(queries.shape).astype(queries.dtype)


def _combine(parts: Sequence[_Part]) -> Any:
    highest = jnp.stack([part.highest for part in parts]).max(axis=0)
    total, out = jnp.zeros_like(highest), jnp.zeros_like(parts[0].out)
    for part in parts:
        scale = jnp.exp(part.highest - highest)
        total, out = total + part.total * scale, out + part.out * scale
    return out / total


def _attend_token(queries: Any, keys: Any, values: Any, index: Any) -> _Part:
    """One query a row; keys and values of all rows of the cache."""
    if values.shape[VALUE_AXIS] % flash_decode.SIZE:
        return _attend_rows(queries, keys, values, index)
    return jax.lax.platform_dependent(
        queries,
        keys,
        values,
        index,
        tpu=_kernel(flash_decode.attend_tpu),
        cuda=_kernel(flash_decode.attend_gpu),
        default=_attend_rows,
    )


@functools.cache
def _kernel(attend: Callable[..., Any]) -> Callable[..., _Part]:
    """Jitted, so that the layers of a model trace it once, not each."""

    def run(queries: Any, keys: Any, values: Any, index: Any) -> _Part:
        return _Part(*flash_decode.per_device(attend, queries, keys, values, index[:, 0]))

    return jax.jit(run)


def _attend_rows(queries: Any, keys: Any, values: Any, index: Any, chosen: Any = None) -> _Part:
    """Attention to one segment of the chosen rows, or of the first ones."""
    rows, kv_heads, _, size = queries.shape
    taken = slice(rows) if chosen is None else chosen
    keys, values = keys[taken], values[taken]
    span = values.shape[2]
    wide = jnp.float32
    scores = jnp.einsum("bkmd,bkdc->bkmc", queries, keys, preferred_element_type=wide)
    seen = jnp.arange(span)[None, None, :] <= index[:, :, None]
    by_group = scores.reshape(rows, kv_heads, -1, index.shape[1], span)
    scores = jnp.where(seen[:, None, None], by_group, MASKED).reshape(scores.shape)
    highest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    out = jnp.einsum(
        "bkmc,bkcd->bkmd", weights.astype(values.dtype), values, preferred_element_type=wide
    )
    return _Part(highest, weights.sum(axis=-1, keepdims=True), out.reshape(*scores.shape[:3], size))


def _attend_if(wanted: Any, queries: Any, *arrays: Any) -> _Part:
    def nothing(queries: Any, *_: Any) -> _Part:
        column = jnp.zeros((*queries.shape[:3], 1), jnp.float32)
        return _Part(column + MASKED, column, jnp.zeros(queries.shape, jnp.float32))

    return jax.lax.cond(wanted, _attend_rows, nothing, queries, *arrays)
