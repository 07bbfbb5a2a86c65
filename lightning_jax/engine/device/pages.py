"""Copies between slot rows and a pool of key/value pages. Holds no state.

A pool is a cache with P rows of PAGE tokens.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.engine.config import LEAST_CACHE_MIB, ServeConfig
from lightning_jax.engine.device.radix import PAGE
from lightning_jax.models.attention.flash_cache import kernel_width
from lightning_jax.models.attention.kv_cache import (
    TOKEN_AXIS,
    KVCache,
    LayerCache,
    init_cache,
    join_caches,
    segment_starts,
)
from lightning_jax.models.mesh import platform_of
from lightning_jax.models.shape import DecoderShape
from lightning_jax.types import Leaf

MAX_POOL_SIZE = 8  # times the slots' own capacity, so that a tiny model's pool stays small


class _Move(NamedTuple):
    """Consecutive blocks of a slot's row, from `first` on, and their pages."""

    slot: Leaf  # int32
    first: Leaf  # int32
    page_ids: Leaf  # int32 [N], padded to the blocks of a row
    num_pages: Leaf  # int32


class PageCopier:
    """Compiled copies for one slot layout.

    `sharding` is the sharding of the slots' cache and of the pool. `jit` is `jax.jit` with the
    engine's options.
    """

    def __init__(
        self,
        shape: DecoderShape,
        serve: ServeConfig,
        dtype: Any,
        sharding: jax.sharding.Sharding,
        jit: Callable[..., Any] = jax.jit,
    ) -> None:
        self.num_blocks = serve.max_len // PAGE  # per row; a partial last page is not cached
        platform = platform_of(sharding)
        self.num_pages = fewest_pages(serve, page_bytes(shape, dtype, platform))
        init = partial(init_cache, shape, self.num_pages, PAGE, dtype, platform)
        self._init = jit(init, out_shardings=sharding)
        copy = _copy_at_once if platform == "gpu" else _copy_in_loop
        self._restore, self._store = (
            jit(partial(move, copy=copy), donate_argnums=0, out_shardings=sharding)
            for move in (_restore, _store)
        )

    def init_pool(self) -> KVCache:
        """Allocate a pool of empty pages. All of its memory is taken at once."""
        return self._init()

    def restore(self, cache: KVCache, slot: int, pool: KVCache, page_ids: Sequence[int]) -> KVCache:
        """Return the slots' cache with these pages in order at the start of the row.

        Donates `cache`.
        """
        return self._restore(cache, pool, self._move(slot, 0, page_ids))

    def store(
        self, pool: KVCache, page_ids: Sequence[int], cache: KVCache, slot: int, first: int
    ) -> KVCache:
        """Return the pool with the row's blocks from `first` on in these pages. Donates `pool`.

        Block i holds the tokens from i * PAGE on.
        """
        return self._store(pool, cache, self._move(slot, first, page_ids))

    def warmup(self, cache: KVCache, pool: KVCache) -> tuple[KVCache, KVCache]:
        """Compile both copies by copying nothing. Donates `cache` and `pool`."""
        if not self.num_pages:
            return cache, pool
        pool = self.store(pool, (), cache, 0, 0)
        return jax.block_until_ready((self.restore(cache, 0, pool, ()), pool))

    @property
    def compiles(self) -> int:
        """Number of programs compiled so far."""
        functions: Any = (self._init, self._restore, self._store)
        return sum(function._cache_size() for function in functions)

    def _move(self, slot: int, first: int, page_ids: Sequence[int]) -> _Move:
        # JAX would silently clamp a block that extends past the row.
        assert first + len(page_ids) <= self.num_blocks, "the row has no blocks left"
        padded = np.zeros(self.num_blocks, np.int32)
        padded[: len(page_ids)] = page_ids
        return _Move(np.int32(slot), np.int32(first), padded, np.int32(len(page_ids)))


def fewest_pages(serve: ServeConfig, size: int) -> int:
    """Return the number of pages of `size` bytes that the settings ask for.

    If they leave it open, these are 256 MiB or a row of a slot, whichever is more.
    """
    blocks, mib = serve.max_len // PAGE, serve.prefix_cache_mib
    if mib is None:
        number = max(int(LEAST_CACHE_MIB * 2**20) // size, blocks)
    else:
        number = int(mib * 2**20) // size
    return min(number, MAX_POOL_SIZE * serve.slots * blocks)


def page_bytes(shape: DecoderShape, dtype: Any, platform: str = "cpu") -> int:
    """Return the bytes of one page for all layers, summed over the devices that share it."""
    width = kernel_width(platform, shape.head_dim)
    numbers = 2 * shape.num_layers * PAGE * shape.num_kv_heads * width
    return numbers * np.dtype(dtype).itemsize


def _restore(cache: KVCache, pool: KVCache, move: _Move, *, copy: Callable[..., Any]) -> KVCache:
    segments = [
        copy(pool, segment, move, begin, end, to_row=True) if begin < end else segment
        for segment, begin, end in _blocks_of_segments(cache, len(move.page_ids))
    ]
    return join_caches(segments)


def _store(pool: KVCache, cache: KVCache, move: _Move, *, copy: Callable[..., Any]) -> KVCache:
    for segment, begin, end in _blocks_of_segments(cache, len(move.page_ids)):
        if begin < end:
            pool = copy(segment, pool, move, begin, end, to_row=False)
    return pool


def _copy_in_loop(
    source: KVCache, target: KVCache, move: _Move, begin: int, end: int, *, to_row: bool
) -> KVCache:
    """Copy blocks `begin` to `end` of a row, which are one segment of it, as far as `move` says."""

    def step(i: Any, target: KVCache) -> KVCache:
        positions = (move.page_ids[i - move.first], 0), (move.slot, (i - begin) * PAGE)
        return _copy_page(source, target, *(positions if to_row else positions[::-1]))

    low, high = jnp.maximum(move.first, begin), jnp.minimum(move.first + move.num_pages, end)
    return jax.lax.fori_loop(low, high, step, target)


def _copy_at_once(
    source: KVCache, target: KVCache, move: _Move, begin: int, end: int, *, to_row: bool
) -> KVCache:
    """Copy like `_copy_in_loop`, but always in the time of a whole row.

    On a GPU the host would wait at each iteration of a loop.
    """
    index = jnp.arange(begin, end) - move.first
    in_move = (index >= 0) & (index < move.num_pages)
    page_ids = move.page_ids[jnp.clip(index, 0, len(move.page_ids) - 1)]

    def put_in_row(pages: Any, rows: Any, axis: int) -> Any:
        old = _blocks_of_row(rows, move.slot, axis, end - begin)
        new = jnp.where(in_move[:, None, None, None], pages[page_ids], old)
        row = jax.lax.collapse(jnp.moveaxis(new, 0, axis - 1), axis - 1, axis + 1)
        return jax.lax.dynamic_update_slice(rows, row[None], (move.slot, 0, 0, 0))

    def put_in_pages(rows: Any, pages: Any, axis: int) -> Any:
        to = jnp.where(in_move, page_ids, len(pages))  # past the last page: dropped
        return pages.at[to].set(_blocks_of_row(rows, move.slot, axis, end - begin), mode="drop")

    return _map_sides(put_in_row if to_row else put_in_pages, source, target)


def _map_sides(put: Callable[..., Any], source: KVCache, target: KVCache) -> KVCache:
    """Apply `put` to the keys and values of each layer, passing the axis of their tokens."""

    def put_sides(source: LayerCache, target: LayerCache) -> LayerCache:
        keys = jax.tree.map(partial(put, axis=target.key_axis), source.keys, target.keys)
        values = jax.tree.map(partial(put, axis=TOKEN_AXIS), source.values, target.values)
        return replace(target, keys=keys, values=values)

    pairs = zip(source.layers, target.layers, strict=True)
    return KVCache(tuple(itertools.starmap(put_sides, pairs)))


def _blocks_of_row(rows: Any, slot: Any, axis: int, number: int) -> Any:
    """Return a row's first `number` blocks, shaped like pages and stacked on the first axis."""
    row = jax.lax.dynamic_index_in_dim(rows, slot, keepdims=False)
    blocks = jax.lax.slice_in_dim(row, 0, number * PAGE, axis=axis - 1)
    shape = (*row.shape[: axis - 1], number, PAGE, *row.shape[axis:])
    return jnp.moveaxis(blocks.reshape(shape), axis - 1, 0)


def _blocks_of_segments(cache: KVCache, number: int) -> list[tuple[KVCache, int, int]]:
    """Return each segment with its first and end block, for a row of `number` blocks."""
    starts = segment_starts(cache.layers[0].values)
    assert not any(start % PAGE for start in starts), "a page is in one segment"
    spans = itertools.pairwise((*(start // PAGE for start in starts), number))
    return [(segment, *span) for segment, span in zip(cache.split(), spans, strict=True)]


def _copy_page(source: KVCache, target: KVCache, from_position: Any, to_position: Any) -> KVCache:
    """Return `target` with PAGE tokens of `source`. Positions are (row, token) in a single segment.

    A loop of these runs in place, and its time is in proportion to the pages copied. A gather or
    scatter of a padded list takes the time of a whole row and needs one program per row length.
    """

    def start_indices(position: Any, axis: int) -> tuple[Any, ...]:
        row, token = position
        return (row, *(token if i == axis else 0 for i in (1, 2, 3)))

    def copy(from_: Any, into: Any, axis: int) -> Any:
        size = (1, *(PAGE if i == axis else n for i, n in enumerate(from_.shape) if i))
        page = jax.lax.dynamic_slice(from_, start_indices(from_position, axis), size)
        return jax.lax.dynamic_update_slice(into, page, start_indices(to_position, axis))

    return _map_sides(copy, source, target)
