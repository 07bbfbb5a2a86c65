"""The key/value cache: how it lies in memory, writing tokens to it, and attention to it.

A row of keys is [K, D, C] and one of values [K, C, D], so that both products of attention read them
as they lie; for any other order XLA's CPU compiler copies the whole cache every step. A row is cut
into segments, which are arrays of their own: a step that needs only the beginnings of the rows
takes only the first ones, while a slice of one array would be copied.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lightning_jax.models import flash_cache
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


def segment_lengths(length: int, *, whole: bool = False) -> tuple[int, ...]:
    """The segments of rows of `length` tokens: 1600 gives 256, 256, 256, 256, 512, 64.

    Long ones are half of what comes before, so that what is read is little more than what is there.
    `whole` is for a device whose kernels read no more of a row than is there: 1600 gives 1536, 64,
    the first being all that the kernels take.
    """
    if whole:
        rest = length % flash_cache.SIZE
        return tuple(part for part in (length - rest, rest) if part)
    lengths: list[int] = []
    while (done := sum(lengths)) < length:
        lengths.append(min(max(SEGMENT, done // 2 // SEGMENT * SEGMENT), length - done))
    return tuple(lengths)


def segment_starts(segments: Sequence[Any]) -> list[int]:
    """The place in the row where each segment of values begins."""
    return [0, *itertools.accumulate(segment.shape[VALUE_AXIS] for segment in segments)][:-1]


def make_cache(
    *,
    layers: int,
    rows: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any,
    whole: bool = False,
) -> KVCache:
    """An empty cache, zeros, in the segments of `segment_lengths`."""
    lengths = segment_lengths(length, whole=whole)
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
    are several queries a row; a caller that knows better leaves them out. A GPU runs a kernel of
    its own, and a TPU one with one query for each of the first rows; they skip what a row does not
    see (flash_cache.py).
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
    segments = zip(segment_starts(values), keys, values, strict=True)
    parts = [
        _attend_segment(grouped, key, value, index - start, rows, certain=start == 0)
        for start, key, value in segments
    ]
    out = _combine(parts).reshape(number, kv_heads, heads // kv_heads, length, size)
    return out.transpose(0, 3, 1, 2, 4).reshape(queries.shape).astype(queries.dtype)


def _combine(parts: Sequence[_Part]) -> Any:
    highest = jnp.stack([part.highest for part in parts]).max(axis=0)
    total, out = jnp.zeros_like(highest), jnp.zeros_like(parts[0].out)
    for part in parts:
        scale = jnp.exp(part.highest - highest)
        total, out = total + part.total * scale, out + part.out * scale
    return out / total


def _attend_segment(
    queries: Any, keys: Any, values: Any, index: Any, rows: Any, *, certain: bool
) -> _Part:
    """Attention to one segment of these rows, or of the first ones; `certain`: each query sees
    something of it.
    """
    is_token = index.shape[1] == 1 and rows is None
    plain = _attend_rows if is_token or certain else _attend_if
    arrays = (queries, keys, values, index, *(() if rows is None else (rows,)))
    if values.shape[VALUE_AXIS] % flash_cache.SIZE:
        return plain(*arrays)
    kernels = {"cuda": _on_gpu} | ({"tpu": _on_tpu} if is_token else {})
    return jax.lax.platform_dependent(*arrays, **kernels, default=plain)


# Jitted, so that the layers of a model trace them once, not each.
@jax.jit
def _on_tpu(queries: Any, keys: Any, values: Any, index: Any) -> _Part:
    arrays = (queries, keys, values, index[:, 0])
    return _Part(*flash_cache.per_device(flash_cache.attend_tpu, *arrays))


@jax.jit
def _on_gpu(queries: Any, keys: Any, values: Any, index: Any, rows: Any = None) -> _Part:
    rows = jnp.arange(len(queries), dtype=jnp.int32) if rows is None else rows
    index = jnp.tile(index, (1, queries.shape[2] // index.shape[1]))
    arrays = (queries, keys, values, index, rows)
    return _Part(*flash_cache.per_device(flash_cache.attend_gpu, *arrays))


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


def _attend_if(queries: Any, keys: Any, values: Any, index: Any, *chosen: Any) -> _Part:
    def nothing(queries: Any, *_: Any) -> _Part:
        column = jnp.zeros((*queries.shape[:3], 1), jnp.float32)
        return _Part(column + MASKED, column, jnp.zeros(queries.shape, jnp.float32))

    arrays = (queries, keys, values, index, *chosen)
    return jax.lax.cond(index.max() >= 0, _attend_rows, nothing, *arrays)
