"""Attention of new tokens to the key/value cache, as Pallas kernels for TPU and GPU.

A row reads the blocks of keys and values up to its own last token, and no more, however much longer
the other rows are. That is arXiv 2309.06180's aim with rows that lie in one piece: cache.py's
segments are read as they lie, without a copy. The recurrence over blocks is flash.py's. The TPU's
kernel takes one new token a row; the GPU's any number, so that it prefills, too.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from lightning_jax.models import flash
from lightning_jax.models.blockwise import MASKED, pad_to
from lightning_jax.models.flash import Sums, product
from lightning_jax.models.mesh_axes import partition

SIZE = 128  # the tokens of a segment that the kernels take are a multiple of this
_TPU_SIZES = (512, 256, SIZE)
_GPU_SIZES = (64, 32)  # tokens of a block whose rows have up to 256 bytes, and of longer rows
_GPU_NARROWEST = 16  # queries and head sizes that tensor cores take
_GPU_PROGRAMS = 512  # three to four for each of an H100's 132 processors


def per_device(kernel: Callable[..., Any], *arrays: Any) -> Any:
    """What a kernel gives that each device of the arrays' mesh calls for its key heads.

    Where the mesh does not divide those, each device computes all of them.
    """
    kv_heads = arrays[1].shape[1]

    def place(mesh: Any) -> tuple[Any, Any]:
        heads = partition(("kv_heads",), (kv_heads,), mesh)
        by_head = jax.P(None, *heads)
        return (by_head,) * 3 + (jax.P(),) * (len(arrays) - 3), (by_head,) * 3

    return flash.per_device(kernel, arrays, place)


def attend_tpu(
    queries: Float[Array, "B K M D"],
    keys: Float[Array, "S K D C"],
    values: Float[Array, "S K C D"],
    index: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B K M 1"], Float[Array, "B K M 1"], Float[Array, "B K M D"]]:
    """(highest score, sum of exp(score - highest), sum of those times the values), float32.

    Row b sees the tokens up to `index[b]`, which may be below 0 (none) or past the end (all). The M
    scaled queries of a row and key head are those of the query heads that share it.
    """
    rows, kv_heads, members, width = queries.shape
    span = values.shape[2]
    size = next(size for size in _TPU_SIZES if span % size == 0)

    def last(row: Any, block: Any, index: Any) -> Any:
        """The block, but for those behind the row's last token that one: it is there already."""
        return jnp.minimum(block, jax.lax.div(jnp.maximum(index[row], 0), size))

    def of_row(row: Any, block: Any, index: Any) -> Any:
        return row, 0, 0, 0

    column = jax.ShapeDtypeStruct((rows, kv_heads, members, 1), jnp.float32)
    return pl.pallas_call(
        _tpu_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, span // size),
            in_specs=[
                pl.BlockSpec((None, kv_heads, members, width), of_row),
                pl.BlockSpec((None, kv_heads, width, size), lambda *at: (at[0], 0, 0, last(*at))),
                pl.BlockSpec((None, kv_heads, size, width), lambda *at: (at[0], 0, last(*at), 0)),
            ],
            out_specs=[
                pl.BlockSpec((None, kv_heads, members, 1), of_row),
                pl.BlockSpec((None, kv_heads, members, 1), of_row),
                pl.BlockSpec((None, kv_heads, members, width), of_row),
            ],
        ),
        out_shape=[column, column, jax.ShapeDtypeStruct(queries.shape, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(jnp.minimum(index, span - 1), queries, keys, values)


def _tpu_kernel(index: Any, query: Any, key: Any, value: Any, *results: Any) -> None:
    """One block of tokens of one row; `results` are a row's Sums and gather over its blocks."""
    last, block = index[pl.program_id(0)], pl.program_id(1)
    size = key.shape[2]

    @pl.when(block == 0)
    def _start() -> None:
        for ref, start in zip(results, (MASKED, 0.0, 0.0), strict=True):
            ref[...] = jnp.full(ref.shape, start, jnp.float32)

    @pl.when(block * size <= last)
    def _meet() -> None:
        for head in range(key.shape[0]):
            scores = _scores(query[head], key[head], block * size, last)
            added = Sums(*(ref[head] for ref in results)).add(scores, value[head])
            for ref, new in zip(results, added, strict=True):
                ref[head] = new


def attend_gpu(
    queries: Float[Array, "B K M D"],
    keys: Float[Array, "S K D C"],
    values: Float[Array, "S K C D"],
    index: Int[Array, "B M"],
    rows: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B K M 1"], Float[Array, "B K M 1"], Float[Array, "B K M D"]]:
    """As `attend_tpu`, for any number of new tokens of any rows of the cache.

    Query m of row b sees the tokens of cache row `rows[b]` up to `index[b, m]`. Where rows and
    heads are too few for all processors of a GPU, a row's tokens are dealt out in parts.
    A head size that is no power of two makes it copy the cache, padded.
    """
    number, kv_heads, members, width = queries.shape
    wide = max(_GPU_NARROWEST, pl.next_power_of_2(width))
    size = _GPU_SIZES[wide * keys.dtype.itemsize > 256]  # else it is too much shared memory
    tall = min(size, max(_GPU_NARROWEST, pl.next_power_of_2(members)))
    keys, values = pad_to(keys, wide, 2), pad_to(values, wide, 3)
    queries = pad_to(pad_to(queries, wide, 3), tall, 2)
    slots, span, height = keys.shape[0], values.shape[2], queries.shape[2]
    # What is padded sees nothing.
    index = jnp.pad(
        jnp.minimum(index, span - 1), ((0, 0), (0, -members % tall)), constant_values=-1
    )
    programs = number * kv_heads * height // tall
    parts = max(1, min(_GPU_PROGRAMS // programs, span // (2 * size)))

    def of_queries(head: Any, part: Any, block: Any, row: Any) -> Any:
        return row, head, block, 0

    def of_part(head: Any, part: Any, block: Any, row: Any) -> Any:
        return part, row, head, block, 0

    def of_head(head: Any, part: Any, block: Any, row: Any) -> Any:
        return 0, head, 0, 0

    column = jax.ShapeDtypeStruct((parts, number, kv_heads, height, 1), jnp.float32)
    highest, total, out = pl.pallas_call(
        functools.partial(_gpu_kernel, size=size),
        grid=(kv_heads, parts, height // tall, number),
        in_specs=[
            pl.BlockSpec((None,), lambda head, part, block, row: (row,)),
            pl.BlockSpec((None, tall), lambda head, part, block, row: (row, block)),
            pl.BlockSpec((None, None, tall, wide), of_queries),
            pl.BlockSpec((slots, None, wide, span), of_head),
            pl.BlockSpec((slots, None, span, wide), of_head),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, tall, 1), of_part),
            pl.BlockSpec((None, None, None, tall, 1), of_part),
            pl.BlockSpec((None, None, None, tall, wide), of_part),
        ],
        out_shape=[column, column, jax.ShapeDtypeStruct((parts, *queries.shape), jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(rows, index, queries, keys, values)
    top = highest.max(axis=0)
    scale = jnp.exp(highest - top[None])
    total, out = (total * scale).sum(axis=0), (out * scale).sum(axis=0)
    return top[:, :, :members], total[:, :, :members], out[:, :, :members, :width]


def _gpu_kernel(
    row: Any, index: Any, query: Any, keys: Any, values: Any, *results: Any, size: int
) -> None:
    """One part of the tokens of one row and key head, for one block of queries."""
    row, queries, limits = row[...], query[...], index[...]
    blocks = jnp.maximum(jnp.max(limits) + size, 0) // size  # those that some query sees
    each = (blocks + pl.num_programs(1) - 1) // pl.num_programs(1)
    first = pl.program_id(1) * each

    def meet(step: Any, sums: Sums) -> Sums:
        block = pl.ds(step * size, size)
        scores = _scores(queries, keys[row, :, block], step * size, limits[:, None])
        return sums.add(scores, values[row, block, :])

    end = jnp.minimum(first + each, blocks)
    sums = jax.lax.fori_loop(first, end, meet, Sums.start(*queries.shape))
    for ref, result in zip(results, sums, strict=True):
        ref[...] = result


def _scores(query: Any, key: Any, first: Any, last: Any) -> Any:
    """Scores [M C] of queries [M D] on keys [D C], of which `first` is the first one's place."""
    scores = product(query, key, 1, 0)
    places = first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.where(places <= last, scores, MASKED)
