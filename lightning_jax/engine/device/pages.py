"""Copies between slot rows and a pool of key/value pages. Holds no state.

A pool is a cache with P rows of PAGE tokens.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

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

MAX_POOL_SIZE = 8  # times the slots' own capacity, so that a tiny model's pool stays small
MIN_MOVES = 64  # of one copy, so that the requests of a turn need one even where rows are short
PADDING = 2**30  # block of a move that is none


class Move(NamedTuple):
    """Copy of PAGE tokens between a page and a block of a slot's row.

    Block i holds the tokens from i * PAGE on.
    """

    page: int
    slot: int
    block: int


Moves = Int32[Array, "N 3"]  # in order of their blocks, then padding


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

    def restore(self, cache: KVCache, pool: KVCache, moves: Sequence[Move]) -> KVCache:
        """Return the slots' cache with pages copied to blocks. Donates `cache`."""
        for packed in self._pack(moves):
            cache = self._restore(cache, pool, packed)
        return cache

    def store(self, pool: KVCache, cache: KVCache, moves: Sequence[Move]) -> KVCache:
        """Return the pool with blocks copied to pages, to each at most one. Donates `pool`."""
        for packed in self._pack(moves):
            pool = self._store(pool, cache, packed)
        return pool

    def warmup(self, cache: KVCache, pool: KVCache) -> tuple[KVCache, KVCache]:
        """Compile both copies by copying nothing. Donates `cache` and `pool`."""
        if not self.num_pages:
            return cache, pool
        nothing = self.no_moves()
        pool = self._store(pool, cache, nothing)
        return jax.block_until_ready((self._restore(cache, pool, nothing), pool))

    def no_moves(self) -> Int32[np.ndarray, "N 3"]:
        """Return the padding of one copy."""
        number = max(self.num_blocks, MIN_MOVES)
        return np.tile(np.array(Move(0, 0, PADDING), np.int32), (number, 1))

    @property
    def compiles(self) -> int:
        """Number of programs compiled so far."""
        functions: Any = (self._init, self._restore, self._store)
        return sum(function._cache_size() for function in functions)

    def _pack(self, moves: Sequence[Move]) -> Iterator[Int32[np.ndarray, "N 3"]]:
        # JAX would silently clamp a block that extends past the row.
        assert all(move.block < self.num_blocks for move in moves), "the row has no blocks left"
        ordered = sorted(moves, key=lambda move: move.block)
        while ordered:
            packed = self.no_moves()
            now, ordered = ordered[: len(packed)], ordered[len(packed) :]
            packed[: len(now)] = now
            yield packed


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
    mixers = [block.mixer for block in shape.blocks]
    numbers = sum(m.kv_heads * kernel_width(platform, m.head_dim) for m in mixers)
    return 2 * PAGE * numbers * np.dtype(dtype).itemsize


def _restore(cache: KVCache, pool: KVCache, moves: Moves, *, copy: Callable[..., Any]) -> KVCache:
    segments = [
        copy(pool, segment, moves, begin, end, to_row=True) if begin < end else segment
        for segment, begin, end in _blocks_of_segments(cache)
    ]
    return join_caches(segments)


def _store(pool: KVCache, cache: KVCache, moves: Moves, *, copy: Callable[..., Any]) -> KVCache:
    for segment, begin, end in _blocks_of_segments(cache):
        if begin < end:
            pool = copy(segment, pool, moves, begin, end, to_row=False)
    return pool


def _copy_in_loop(
    source: KVCache, target: KVCache, moves: Moves, begin: int, end: int, *, to_row: bool
) -> KVCache:
    """Make the moves of blocks `begin` to `end` of the rows, which are in one segment."""

    def step(i: Any, target: KVCache) -> KVCache:
        page, slot, block = moves[i]
        positions = (page, 0), (slot, (block - begin) * PAGE)
        return _copy_page(source, target, *(positions if to_row else positions[::-1]))

    *_, blocks = moves.T
    low, high = jnp.sum(blocks < begin), jnp.sum(blocks < end)
    return jax.lax.fori_loop(low, high, step, target)


def _copy_at_once(
    source: KVCache, target: KVCache, moves: Moves, begin: int, end: int, *, to_row: bool
) -> KVCache:
    """Copy like `_copy_in_loop`, but always in the time of all N moves.

    On a GPU the host would wait at each iteration of a loop.
    """
    assert begin == 0, "rows are in one piece"
    page, slot, block = moves.T
    is_padding = block >= end
    block = jnp.where(is_padding, 0, block)

    def in_blocks(rows: Any) -> Any:
        return rows.reshape(*rows.shape[:3], end, PAGE, rows.shape[-1])

    def put_in_row(pages: Any, rows: Any, **_: int) -> Any:
        to = jnp.where(is_padding, rows.shape[1], slot)  # past the last row: dropped
        chosen = jnp.moveaxis(pages[:, page], 1, 0)
        blocks = in_blocks(rows).at[:, to, :, block].set(chosen, mode="drop")
        return blocks.reshape(rows.shape)

    def put_in_pages(rows: Any, pages: Any, **_: int) -> Any:
        to = jnp.where(is_padding, pages.shape[1], page)  # past the last page: dropped
        chosen = in_blocks(rows)[:, slot, :, block]
        return pages.at[:, to].set(jnp.moveaxis(chosen, 0, 1), mode="drop")

    return _map_sides(put_in_row if to_row else put_in_pages, source, target)


def _map_sides(put: Callable[..., Any], source: KVCache, target: KVCache) -> KVCache:
    """Apply `put` to the keys and values of the layers, passing the axis of their tokens.

    The arrays that it gets have an axis for the stacked layers in front.
    """

    def put_one(source_rows: Any, target_rows: Any, axis: int) -> Any:
        stacks = (
            rows.reshape(target.stacked, -1, *rows.shape[1:]) for rows in (source_rows, target_rows)
        )
        return put(*stacks, axis=axis + 1).reshape(target_rows.shape)

    def put_sides(source: LayerCache, target: LayerCache) -> LayerCache:
        keys = jax.tree.map(partial(put_one, axis=target.key_axis), source.keys, target.keys)
        values = jax.tree.map(partial(put_one, axis=TOKEN_AXIS), source.values, target.values)
        return replace(target, keys=keys, values=values)

    pairs = zip(source.layers, target.layers, strict=True)
    return replace(target, layers=tuple(itertools.starmap(put_sides, pairs)))


def _blocks_of_segments(cache: KVCache) -> list[tuple[KVCache, int, int]]:
    """Return each segment with its first and end block of a row."""
    starts = segment_starts(cache.layers[0].values)
    assert not any(start % PAGE for start in starts), "a page is in one segment"
    spans = itertools.pairwise(edge // PAGE for edge in (*starts, cache.length))
    return [(segment, *span) for segment, span in zip(cache.split(), spans, strict=True)]


def _copy_page(source: KVCache, target: KVCache, from_position: Any, to_position: Any) -> KVCache:
    """Return `target` with PAGE tokens of `source`. Positions are (row, token) in a single segment.

    A loop of these runs in place, and its time is in proportion to the pages copied. A gather or
    scatter of a padded list takes the time of the whole list.
    """

    def start_indices(position: Any, axis: int) -> tuple[Any, ...]:
        row, token = position
        return (0, row, *(token if i == axis else 0 for i in (2, 3, 4)))

    def copy(from_: Any, into: Any, axis: int) -> Any:
        layers, _, *rest = from_.shape
        size = (layers, 1, *(PAGE if i == axis else n for i, n in enumerate(rest, 2)))
        page = jax.lax.dynamic_slice(from_, start_indices(from_position, axis), size)
        return jax.lax.dynamic_update_slice(into, page, start_indices(to_position, axis))

    return _map_sides(copy, source, target)
