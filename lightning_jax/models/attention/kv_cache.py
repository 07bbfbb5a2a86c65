"""KV cache: its memory layout, writing tokens to it, and attention to it.

On a CPU a row of keys is [K, D, C] and a row of values is [K, C, D]. Both products of attention
then read them in place. With any other order, XLA copies the whole cache every step. A row is cut
into segments, which are separate arrays. A step that needs only the beginnings of the rows takes
only the first segments, but a slice of one array would be copied.

On a GPU or TPU a row is whole, because the kernels read it up to its last token (flash_cache.py).
A token's key is contiguous there. With tokens on the last axis, the TPU compiler would transpose
all keys to write one, and transpose them back. The rows of all layers are in one array, because
the host takes longer to pass an array for each layer than the device takes to compute.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from lightning_jax.models.attention import flash, flash_cache
from lightning_jax.models.attention.blockwise import MASKED, by_head, by_token, pad_to
from lightning_jax.models.attention.flash import Sums
from lightning_jax.models.shape import DecoderShape
from lightning_jax.types import Leaf

SEGMENT = 256  # tokens of the first segments; reading fewer saves almost nothing
TOKEN_AXIS = 2  # token axis of a segment of values
Segments = tuple[Leaf, ...]
Queries = Float[Array, "B K M D"]  # M queries of each key head
Indices = Int[Array, "B T"]  # of tokens in a row
Rows = Int[Array | np.ndarray, " B"]  # of the cache, one for each row of the batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, in segments [S, K, D, C] and [S, K, C, D] with row = slot.

    If it is `whole`, there is one array of keys and one of values, both [R, K, C, D] with the rows
    of all layers, of which those of layer i begin at i * S. D may be wider than a head.
    """

    keys: Segments
    values: Segments
    whole: bool = field(default=False, metadata={"static": True})

    @property
    def length(self) -> int:
        """Number of tokens that a row holds."""
        return sum(segment.shape[TOKEN_AXIS] for segment in self.values)

    @property
    def key_axis(self) -> int:
        """Token axis of a segment of keys."""
        return TOKEN_AXIS if self.whole else 3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, or of `stacked` layers in each of `layers`."""

    layers: tuple[LayerCache, ...]
    stacked: int = field(default=1, metadata={"static": True})

    @property
    def length(self) -> int:
        """Number of tokens that a row holds."""
        return self.layers[0].length

    @property
    def num_rows(self) -> int:
        """Number of rows S of each layer."""
        return self.layers[0].values[0].shape[0] // self.stacked

    def rows_of(self, layer: int, rows: Rows | None, number: int) -> Rows | None:
        """Return where a layer's `rows`, by default its first `number`, are in its array."""
        if self.stacked == 1:
            return rows
        first = layer % self.stacked * self.num_rows
        # Without rows it is a constant, which takes no work of the device.
        return first + (np.arange(number, dtype=np.int32) if rows is None else rows)

    def split(self) -> "list[KVCache]":
        """Return one cache for each segment, the inverse of `join`."""
        return [
            replace(
                self,
                layers=tuple(
                    replace(layer, keys=(layer.keys[i],), values=(layer.values[i],))
                    for layer in self.layers
                ),
            )
            for i in range(len(self.layers[0].values))
        ]


def join_caches(parts: Sequence[KVCache]) -> KVCache:
    """Concatenate the rows of the parts to one cache."""
    layers = tuple(
        replace(
            same[0],
            keys=tuple(itertools.chain(*(layer.keys for layer in same))),
            values=tuple(itertools.chain(*(layer.values for layer in same))),
        )
        for same in zip(*(part.layers for part in parts), strict=True)
    )
    return replace(parts[0], layers=layers)


def is_whole(platform: str) -> bool:
    """Return whether devices of this JAX platform store each row in one piece."""
    return platform in ("gpu", "tpu")


def row_length(tokens: int, platform: str) -> int:
    """Return the row length for this number of tokens, rounded up if the kernels need it."""
    return tokens + -tokens % flash_cache.SIZE if is_whole(platform) else tokens


def segment_lengths(length: int) -> tuple[int, ...]:
    """Return the segment lengths of rows of `length` tokens: 1600 gives 256 (4 times), 512, 64.

    A long segment has half as many tokens as all before it, so that few empty places are read.
    """
    lengths: list[int] = []
    while (done := sum(lengths)) < length:
        lengths.append(min(max(SEGMENT, done // 2 // SEGMENT * SEGMENT), length - done))
    return tuple(lengths)


def segment_starts(segments: Sequence[Any]) -> list[int]:
    """Return the index in the row where each segment of values starts."""
    return [0, *itertools.accumulate(segment.shape[TOKEN_AXIS] for segment in segments)][:-1]


def init_cache(
    shape: DecoderShape,
    rows: int,
    length: int,
    dtype: Any = jnp.float32,
    platform: str = "cpu",
) -> KVCache:
    """Build a cache of zeros for a model of this shape, in the layout of this platform.

    Where rows are whole, those of all layers are in one array if they are alike.
    """
    whole = is_whole(platform)
    lengths = (length,) if whole else segment_lengths(length)
    sizes = [(block.mixer.kv_heads, block.mixer.head_dim) for block in shape.blocks]
    stacked = len(sizes) if whole and len(set(sizes)) == 1 else 1

    def layer(heads: int, head_dim: int) -> LayerCache:
        width, number = flash_cache.kernel_width(platform, head_dim), rows * stacked
        values = [(number, heads, size, width) for size in lengths]
        keys = values if whole else [(number, heads, width, size) for size in lengths]
        sides = [tuple(jnp.zeros(size, dtype) for size in sizes) for sizes in (keys, values)]
        return LayerCache(sides[0], sides[1], whole)

    return KVCache(tuple(layer(*size) for size in sizes[::stacked]), stacked)


def write_cache(
    layer: LayerCache,
    new_keys: Float[Array, "B T K D"],
    new_values: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    rows: Rows | None = None,
) -> LayerCache:
    """Write new tokens at `positions` of these rows, or of the first B rows.

    Tokens at positions outside the row are dropped.
    """
    rows = (jnp.arange(new_keys.shape[0]) if rows is None else rows)[:, None]
    width = layer.values[0].shape[3]
    new_keys, new_values = pad_to(new_keys, width, 3), pad_to(new_values, width, 3)
    keys, values = [], []
    for start, key, value in zip(
        segment_starts(layer.values), layer.keys, layer.values, strict=True
    ):
        # A negative index would count from the end.
        index = jnp.where(positions < start, value.shape[TOKEN_AXIS], positions - start)
        new = new_keys.astype(key.dtype), new_values.astype(value.dtype)
        key_at = key.at[rows, :, index] if layer.whole else key.at[rows, :, :, index]
        keys.append(key_at.set(new[0], mode="drop"))
        values.append(value.at[rows, :, index].set(new[1], mode="drop"))
    return replace(layer, keys=tuple(keys), values=tuple(values))


def attend_cache(
    queries: Float[Array, "B T H D"],
    layer: LayerCache,
    positions: Int[Array, "B T"],
    rows: Rows | None = None,
    window: int | None = None,
) -> Float[Array, "B T H D"]:
    """Return attention to these rows, or to the first B, at indices up to each query's position.

    With a window they are the last `window` of these. Query head h reads key head h // (H / K).
    With several queries per row or a window, segments that no query sees are skipped. A caller that
    knows the segments it needs can pass only those.
    """
    number, length, heads, size = queries.shape
    kv_heads = layer.values[0].shape[1]
    grouped = by_head(queries * size**-0.5, kv_heads).reshape(number, kv_heads, -1, size)
    grouped = grouped.astype(layer.keys[0].dtype)  # or the keys would be cast to a wider dtype
    # Padding sees index 0, so that it does not make real queries read empty segments.
    index = jnp.where(positions < layer.length, positions, 0)
    first = None if window is None else index - (window - 1)
    attend = _attend_whole if layer.whole else _attend_segments
    grouped = pad_to(grouped, layer.values[0].shape[3], 3)
    out = attend(grouped, layer, index, rows, first)[..., :size]
    by_group = out.reshape(number, kv_heads, heads // kv_heads, length, size)
    return by_token(by_group).astype(queries.dtype)


def _attend_whole(
    queries: Queries, layer: LayerCache, index: Indices, rows: Rows | None, first: Indices | None
) -> Queries:
    (keys,), (values,) = layer.keys, layer.values
    rows = jnp.arange(len(queries), dtype=jnp.int32) if rows is None else rows
    repeats = (1, queries.shape[2] // index.shape[1])
    index = jnp.tile(index, repeats)
    first = None if first is None else jnp.tile(first, repeats)
    arrays = (queries, keys, values, index, rows, first)
    if keys.shape[TOKEN_AXIS] % flash_cache.SIZE:
        return _at_once(*arrays)
    kernels = {"cuda": flash_cache.attend_gpu, "tpu": flash_cache.attend_tpu}
    specs = flash_cache.partition_specs
    split = {name: flash.per_device(kernel, specs) for name, kernel in kernels.items()}
    return jax.lax.platform_dependent(*arrays, **split, default=_at_once)


@jax.jit  # so that it is traced once for all layers of a model
def _at_once(
    queries: Queries,
    keys: Float[Array, "S K C D"],
    values: Float[Array, "S K C D"],
    index: Int[Array, "B M"],
    rows: Rows,
    first: Int[Array, "B M"] | None = None,
) -> Queries:
    out = _combine([_attend_rows(queries, keys.swapaxes(2, 3), values, index, rows, first)])
    return out.astype(queries.dtype)


def _attend_segments(
    queries: Queries, layer: LayerCache, index: Indices, rows: Rows | None, first: Indices | None
) -> Float32[Array, "B K M D"]:
    """Attend to each segment and combine the parts as in arXiv 1805.02867."""
    segments = zip(segment_starts(layer.values), layer.keys, layer.values, strict=True)
    parts = []
    for start, keys, values in segments:
        is_certain = start == 0 or (index.shape[1] == 1 and rows is None)
        attend = _attend_rows if is_certain and first is None else _attend_if
        lowest = None if first is None else first - start
        parts.append(attend(queries, keys, values, index - start, rows, lowest))
    return _combine(parts)


def _combine(parts: Sequence[Sums]) -> Float32[Array, "B K M D"]:
    """Return the output of M queries of each key head, from their sums over separate keys."""
    top = jnp.stack([part.top for part in parts]).max(axis=0)
    total, out = jnp.zeros_like(top), jnp.zeros_like(parts[0].out)
    for part in parts:
        scale = jnp.exp(part.top - top)
        total, out = total + part.total * scale, out + part.out * scale
    return out / total


def _attend_rows(
    queries: Queries,
    keys: Float[Array, "S K D C"],
    values: Float[Array, "S K C D"],
    index: Indices,
    chosen: Rows | None,
    first: Indices | None,
) -> Sums:
    """Attend to one segment of the chosen rows, or of the first rows."""
    rows, kv_heads, _, size = queries.shape
    indices = slice(rows) if chosen is None else chosen
    keys, values = keys[indices], values[indices]
    span = values.shape[2]
    wide = jnp.float32
    scores = jnp.einsum("bkmd,bkdc->bkmc", queries, keys, preferred_element_type=wide)
    token = jnp.arange(span)[None, None, :]
    seen = token <= index[:, :, None]
    if first is not None:
        seen &= token >= first[:, :, None]
    by_group = scores.reshape(rows, kv_heads, -1, index.shape[1], span)
    scores = jnp.where(seen[:, None, None], by_group, MASKED).reshape(scores.shape)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    out = jnp.einsum(
        "bkmc,bkcd->bkmd", weights.astype(values.dtype), values, preferred_element_type=wide
    )
    return Sums(top, weights.sum(axis=-1, keepdims=True), out.reshape(*scores.shape[:3], size))


def _attend_if(
    queries: Queries,
    keys: Float[Array, "S K D C"],
    values: Float[Array, "S K C D"],
    index: Indices,
    chosen: Rows | None,
    first: Indices | None,
) -> Sums:
    def nothing(queries: Queries, *_: Any) -> Sums:
        column = jnp.zeros((*queries.shape[:3], 1), jnp.float32)
        return Sums(column + MASKED, column, jnp.zeros(queries.shape, jnp.float32))

    is_seen = index.max() >= 0
    if first is not None:
        is_seen &= first.min() < values.shape[TOKEN_AXIS]
    arrays = (queries, keys, values, index, chosen, first)
    return jax.lax.cond(is_seen, _attend_rows, nothing, *arrays)
