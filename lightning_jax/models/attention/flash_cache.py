"""Pallas kernels for GPU and TPU that attend from new tokens to the KV cache.

Interpreted on a CPU, run on an NVIDIA H200, and compiled for TPUs.

A row reads blocks of keys and values only up to its own last token, even if other rows are much
longer. This is the goal of arXiv 2309.06180, reached here with contiguous rows (kv_cache.py). The
recurrence over blocks is in flash.py. The kernels take any number of new tokens of any rows, so
they serve both decode and prefill.

Libraries have kernels for decode alone. On a GPU, tokamax with an end for each row reads this
cache in place when all slots decode (compiled for an H100, not run). It would need a copy of the
rows that prefill chooses. cuDNN needs another layout. `benchmarks/accelerator.py --part decode`
measures both beside the kernel here, and the fastest should stay. On a TPU the ragged paged
attention of a library should replace the kernel here as soon as one can be tried on a TPU.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from lightning_jax.models.attention.blockwise import MASKED, pad_to
from lightning_jax.models.attention.flash import Sums, product
from lightning_jax.models.attention.flash_tpu import list_pairs, split_pair, step_of
from lightning_jax.models.mesh import partition

SIZE = 128  # the kernels need a cache length that is a multiple of this
_TPU_SIZES = (512, 256, SIZE)  # tokens of a block; the first is also the most queries of a block
_TPU_HEADS = 8  # most heads of a block
_TPU_BLOCK = 2**18  # most elements of a block of keys or of queries
_TPU_NARROWEST = 16  # fewest queries of a block: the height of a bfloat16 tile
_GPU_SIZES = (64, 32)  # tokens of a block, for rows of up to 256 bytes and for longer ones
_GPU_NARROWEST = 16  # smallest number of queries and head size for tensor cores
_GPU_PROGRAMS = 512  # three to four for each of an H100's 132 processors


def kernel_width(platform: str, head_dim: int) -> int:
    """Return the stored width of keys and values that spares a platform's kernel a copy."""
    if platform == "tpu":  # a TPU lays out narrower arrays in another order
        return head_dim + -head_dim % SIZE
    if platform == "gpu":
        return max(_GPU_NARROWEST, pl.next_power_of_2(head_dim))
    return head_dim


def partition_specs(mesh: Any, *arrays: Any) -> tuple[Any, Any]:
    """Return how a kernel is split, by key heads, for `flash.per_device`.

    If the mesh does not divide the key heads, each device computes all of them.
    """
    by_head = jax.P(None, *partition(("kv_heads",), (arrays[1].shape[1],), mesh))
    return (by_head, by_head, by_head, jax.P(), jax.P(), jax.P()), by_head


def attend_gpu(
    queries: Float[Array, "B K M D"],
    keys: Float[Array, "S K C D"],
    values: Float[Array, "S K C D"],
    index: Int[Array, "B M"],
    rows: Int[Array, " B"],
    first: Int[Array, "B M"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B K M D"]:
    """Return the attention output of scaled queries.

    M queries, from all new tokens of a row, share a key head. Query m of row b sees the tokens of
    cache row `rows[b]` from `first[b, m]`, by default 0, to `index[b, m]`, 0 to C - 1. If rows and
    heads are too few for all processors of a GPU, a row's tokens are split into parts. D is a
    `kernel_width`.
    """
    number, kv_heads, members, width = queries.shape
    size = _GPU_SIZES[width * keys.dtype.itemsize > 256]  # bounds the shared memory
    tall = min(size, max(_GPU_NARROWEST, pl.next_power_of_2(members)))
    queries = pad_to(queries, tall, 2)
    slots, span, height = keys.shape[0], values.shape[2], queries.shape[2]
    limits = [pad_to(index, tall, 1), *_padded_first(first, tall)]
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
            [pl.BlockSpec((None, tall), lambda head, part, block, row: (row, block))] * len(limits),
            pl.BlockSpec((None, None, tall, width), of_queries),
            pl.BlockSpec((slots, None, span, width), of_head),
            pl.BlockSpec((slots, None, span, width), of_head),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, tall, 1), of_part),
            pl.BlockSpec((None, None, None, tall, 1), of_part),
            pl.BlockSpec((None, None, None, tall, width), of_part),
        ],
        out_shape=[column, column, jax.ShapeDtypeStruct((parts, *queries.shape), jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(rows, limits, queries, keys, values)
    top = highest.max(axis=0)
    scale = jnp.exp(highest - top[None])
    total, out = (total * scale).sum(axis=0), (out * scale).sum(axis=0)
    return (out / total)[:, :, :members].astype(queries.dtype)


def _gpu_kernel(
    row: Any, limits: Any, query: Any, keys: Any, values: Any, *results: Any, size: int
) -> None:
    """Attend from one block of queries to one part of the tokens of one row and key head."""
    row, queries, (index, *first) = row[...], query[...], [limit[...] for limit in limits]
    blocks = jnp.maximum(jnp.max(index) + size, 0) // size  # up to the last that some query sees
    unseen = jnp.maximum(jnp.min(first[0]), 0) // size if first else None  # blocks before a window
    number = blocks if unseen is None else blocks - unseen
    blocks_per_program = (number + pl.num_programs(1) - 1) // pl.num_programs(1)
    begin = pl.program_id(1) * blocks_per_program
    begin = begin if unseen is None else begin + unseen

    def meet(step: Any, sums: Sums) -> Sums:
        block = pl.ds(step * size, size)
        key, start = keys[row, block, :], step * size
        scores = _scores(queries, key, start, [limit[:, None] for limit in (index, *first)])
        return sums.add(scores, values[row, block, :])

    end = jnp.minimum(begin + blocks_per_program, blocks)
    sums = jax.lax.fori_loop(begin, end, meet, Sums.start(*queries.shape))
    for ref, result in zip(results, sums, strict=True):
        ref[...] = result


def attend_tpu(
    queries: Float[Array, "B K M D"],
    keys: Float[Array, "S K C D"],
    values: Float[Array, "S K C D"],
    index: Int[Array, "B M"],
    rows: Int[Array, " B"],
    first: Int[Array, "B M"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B K M D"]:
    """Return the attention output of scaled queries, like `attend_gpu`.

    The pairs of query and token blocks that meet are listed before the kernel starts
    (flash_tpu.py). A row's cost therefore depends only on its own tokens.
    """
    _, kv_heads, members, width = queries.shape
    span = keys.shape[2]
    heads = next(n for n in range(_TPU_HEADS, 0, -1) if kv_heads % n == 0)
    room = _TPU_BLOCK // (heads * width)
    size = next((s for s in _TPU_SIZES if span % s == 0 and s <= room), SIZE)
    blocks = pl.cdiv(members, max(SIZE, min(_TPU_SIZES[0], room)))
    # With several blocks, each has a multiple of a tile's width in queries. A single block has a
    # multiple of a tile's height.
    tile = SIZE if blocks > 1 else _TPU_NARROWEST
    tall = pl.cdiv(pl.cdiv(members, blocks), tile) * tile
    queries = pad_to(queries, blocks * tall, 2)
    limits = [pad_to(index, blocks * tall, 1), *_padded_first(first, blocks * tall)]
    ends = limits[0].reshape(-1, tall).max(axis=1) // size
    visible = jnp.arange(span // size)[None, :] <= ends[:, None]
    if first is not None:
        starts = limits[1].reshape(-1, tall).min(axis=1) // size
        visible &= jnp.arange(span // size)[None, :] >= starts[:, None]
    pairs, counts = list_pairs(visible[None])

    def of_queries(head: Any, step: Any, pairs: Any, counts: Any, rows: Any) -> Any:
        outer, _ = split_pair(pairs[0, step])
        return outer // blocks, head, outer % blocks, 0

    def of_limits(head: Any, step: Any, pairs: Any, counts: Any, rows: Any) -> Any:
        outer, _ = split_pair(pairs[0, step])
        return outer // blocks, 0, outer % blocks

    def of_tokens(head: Any, step: Any, pairs: Any, counts: Any, rows: Any) -> Any:
        outer, inner = split_pair(pairs[0, step])
        return rows[outer // blocks], head, inner, 0

    column = pltpu.VMEM((heads, tall, 1), jnp.float32)
    out = pl.pallas_call(
        _tpu_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(kv_heads // heads, counts[0]),
            in_specs=[
                pl.BlockSpec((None, heads, tall, width), of_queries),
                [pl.BlockSpec((None, 1, tall), of_limits)] * len(limits),
                pl.BlockSpec((None, heads, size, width), of_tokens),
                pl.BlockSpec((None, heads, size, width), of_tokens),
            ],
            out_specs=pl.BlockSpec((None, heads, tall, width), of_queries),
            scratch_shapes=[column, column, pltpu.VMEM((heads, tall, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(pairs, counts, rows, queries, [limit[:, None] for limit in limits], keys, values)
    return out[:, :, :members]


def _tpu_kernel(pairs: Any, counts: Any, rows: Any, *refs: Any) -> None:
    """Attend from one block of queries to one block of tokens, for some key heads."""
    query, limits, key, value, out, *scratch = refs  # `scratch` holds the heads' Sums
    step = step_of(pairs, counts, 0, pl.program_id(1))
    size = key.shape[1]

    @pl.when(step.is_first)
    def _start() -> None:
        for ref, start in zip(scratch, (MASKED, 0.0, 0.0), strict=True):
            ref[...] = jnp.full(ref.shape, start, jnp.float32)

    columns = [jnp.expand_dims(limit[0], 1) for limit in limits]
    for head in range(key.shape[0]):
        scores = _scores(query[head], key[head], step.inner * size, columns)
        added = Sums(*(ref[head] for ref in scratch)).add(scores, value[head])
        for ref, new in zip(scratch, added, strict=True):
            ref[head] = new

    @pl.when(step.is_last)
    def _finish() -> None:
        _, total, weighted = scratch
        out[...] = (weighted[...] / total[...]).astype(out.dtype)


def _padded_first(first: Any, size: int) -> list[Any]:
    """Return the windows' first tokens in a list, which is empty without a window.

    Padded queries see what the last query does, so that no more blocks are read.
    """
    if first is None:
        return []
    return [jnp.pad(first, ((0, 0), (0, -first.shape[1] % size)), mode="edge")]


def _scores(query: Any, key: Any, start: Any, limits: Sequence[Any]) -> Any:
    """Return scores [M C] of queries [M D] on keys [C D]; the first key has index `start`.

    The limits [M 1] are the last index that a query sees and, with a window, the first.
    """
    last, *first = limits
    scores = product(query, key, 1, 1)
    indices = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    seen = indices <= last
    if first:
        seen &= indices >= first[0]
    return jnp.where(seen, scores, MASKED)
