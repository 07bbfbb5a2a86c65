"""Pallas attention kernels for a CUDA GPU, with one program for each of flash.py's blocks.

Run on an NVIDIA H200, interpreted on a CPU, and compiled for other GPUs.

A program keeps a block of queries (or of keys) and loops over the list of blocks that it meets.
Triton compiles the same kernels for every CUDA GPU. JAX deprecates Triton from 0.11 on in favour
of Mosaic GPU, whose kernels must be written for each GPU generation.

tokamax has such kernels (flash_tokamax.py). These stay, because tokamax has none for float32, wide
heads, long rows, windows by depth and other GPUs, and does not run on Python 3.11. XLA alone cannot
replace them. Of a gradient of 4 rows of 4,096 nodes with 12 heads, all scores at once take 8.1 GB.
blockwise.py takes 0.9 GB and has two loops, and after each iteration the host reads whether to go
on. Once JAX has no Triton, the file goes and those cases use blockwise.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from lightning_jax.models.attention import flash
from lightning_jax.models.attention.blockwise import (
    Blocks,
    Window,
    by_token,
    pad_to,
    split_blocks,
)
from lightning_jax.models.attention.flash import Sums

_SIZES = (64, 32)  # rows of a block, for rows of up to 256 bytes and for longer ones
_NARROWEST = 16  # smallest head size for tensor cores; Triton takes only powers of two


def forward(
    queries: Any,
    keys: Any,
    values: Any,
    index: Any,
    ends: Any,
    window: Window | None,
    *,
    interpret: bool = False,
) -> tuple[Any, Any]:
    """Return the output [B T H D] and the log-sum-exp [B K G T] of each query's scores."""
    b = _split(queries, keys, values, index, ends, window)
    numbers = jax.ShapeDtypeStruct(b.queries.shape[:4], jnp.float32)
    outs, log_sums = _run(
        _forward_kernel,
        b,
        outputs=[("query", b.queries), ("number", numbers)],
        interpret=interpret,
    )
    length, width = queries.shape[1], queries.shape[3]
    return by_token(outs)[:, :length, :, :width], log_sums[..., :length]


def backward(
    queries: Any, keys: Any, values: Any, *rest: Any, interpret: bool = False
) -> tuple[Any, Any, Any]:
    """Return the gradients of queries, keys and values.

    `rest` is the other inputs of `forward`, its two results and the gradient of the first.
    """
    index, ends, window, out, log_sums, out_grad = rest
    b = _split(queries, keys, values, index, ends, window)
    length, width = queries.shape[1], queries.shape[3]
    out_grads, *numbers = flash.split_gradient(b, out, log_sums, out_grad)
    more = [pad_to(out_grads, b.queries.shape[4], 4), *numbers]
    (query_grads,) = _run(
        functools.partial(_query_kernel, scale=width**-0.5),
        b,
        more,
        outputs=[("query", b.queries)],
        interpret=interpret,
    )
    grads = _run(
        _key_kernel,
        b,
        more,
        outputs=[("key", b.keys), ("key", b.values)],
        by_key=True,
        interpret=interpret,
    )
    key_grads, value_grads = (x.transpose(0, 2, 1, 3)[:, : keys.shape[1], :, :width] for x in grads)
    return by_token(query_grads)[:, :length, :, :width], key_grads, value_grads


def _split(
    queries: Any, keys: Any, values: Any, index: Any, ends: Any, window: Window | None
) -> Blocks:
    width = max(_NARROWEST, pl.next_power_of_2(queries.shape[3]))
    size = _SIZES[width * keys.dtype.itemsize > 256]  # must fit a small GPU's shared memory
    b = split_blocks(queries, keys, values, index, ends, window, (size,))
    return b._replace(
        queries=pad_to(b.queries, width, 4),
        keys=pad_to(b.keys, width, 3),
        values=pad_to(b.values, width, 3),
    )


def _run(
    kernel: Callable[..., None],
    b: Blocks,
    more: Sequence[Any] = (),
    *,
    outputs: Sequence[tuple[str, Any]],
    by_key: bool = False,
    interpret: bool,
) -> Any:
    """Run a kernel and return its outputs, each described by a kind of block and an array like it.

    There is one program for each row, head and block of queries, or of keys with `by_key`. The last
    inputs are `more`: [B K G T D] and two numbers per query, [B K G T].
    """
    visible = b.visible.swapaxes(1, 2) if by_key else b.visible
    # Blocks that meet come first.
    order = jnp.argsort(~visible, axis=2, stable=True).astype(jnp.int32)
    counts = visible.sum(axis=2, dtype=jnp.int32)
    rows, kv_heads, group, _, width = b.queries.shape
    num_warps = 4 if width * b.keys.dtype.itemsize <= 128 else 8
    specs = _specs(b, by_key)
    limits = [
        tuple(specs[kind] for _ in numbers)
        for kind, numbers in zip(("query_limit", "key_limit"), b.limits, strict=True)
    ]
    inputs = ["query", "key", "key", *(["query", "number", "number"] if more else [])]
    # The first grid axis changes fastest, so that heads that share keys run side by side.
    return pl.pallas_call(
        kernel,
        grid=(1 if by_key else group, visible.shape[1], kv_heads, rows),
        in_specs=[specs["order"], specs["count"], *limits, *(specs[kind] for kind in inputs)],
        out_specs=[specs[kind] for kind, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype) for _, like in outputs],
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=2),
        interpret=interpret,
    )(order, counts, *b.limits, b.queries, b.keys, b.values, *more)


def _specs(b: Blocks, by_key: bool) -> dict[str, pl.BlockSpec]:
    """Return the part of each kind of array that a program sees.

    It is one block of queries and all keys of their key head, or with `by_key` one block of keys
    and all queries of all heads that share it.
    """
    group, num_queries, width = b.queries.shape[2:]
    num_keys = b.keys.shape[2]
    heads, queries, keys = (group, num_queries, b.size) if by_key else (None, b.size, num_keys)

    def query(i: Any) -> Any:
        return 0 if by_key else i

    def key(i: Any) -> Any:
        return i if by_key else 0

    num_others = (num_queries if by_key else num_keys) // b.size
    return {
        "order": pl.BlockSpec((None, None, num_others), lambda g, i, k, row: (row, i, 0)),
        "count": pl.BlockSpec((None, None), lambda g, i, k, row: (row, i)),
        "query_limit": pl.BlockSpec((None, queries), lambda g, i, k, row: (row, query(i))),
        "key_limit": pl.BlockSpec((None, keys), lambda g, i, k, row: (row, key(i))),
        "query": pl.BlockSpec(
            (None, None, heads, queries, width), lambda g, i, k, row: (row, k, g, query(i), 0)
        ),
        "number": pl.BlockSpec(
            (None, None, heads, queries), lambda g, i, k, row: (row, k, g, query(i))
        ),
        "key": pl.BlockSpec((None, None, keys, width), lambda g, i, k, row: (row, k, key(i), 0)),
    }


def _forward_kernel(order: Any, count: Any, *refs: Any) -> None:
    query_limits, key_limits, query, keys, values, out, log_sums = refs
    size, width = query.shape
    rows, of_queries = query[...], [limit[...][:, None] for limit in query_limits]

    def meet(step: Any, sums: Sums) -> Sums:
        first_key = order[step] * size
        block = pl.ds(first_key, size)
        limits = of_queries, [limit[block][None, :] for limit in key_limits]
        scores = flash.masked_scores(rows, keys[block, :], *limits, first_key, key_axis=1)
        return sums.add(scores, values[block, :])

    sums = jax.lax.fori_loop(0, count[...], meet, Sums.start(size, width))
    out[...] = (sums.out / sums.total).astype(out.dtype)
    log_sums[...] = (sums.top + jnp.log(sums.total)).reshape(size)


def _query_kernel(order: Any, count: Any, *refs: Any, scale: float) -> None:
    query_limits, key_limits, query, keys, values, out_grad, log_sums, inner, query_grad = refs
    size, width = query.shape
    rows, of_queries = query[...], [limit[...][:, None] for limit in query_limits]
    grad = out_grad[...]
    saved = log_sums[...][:, None], inner[...][:, None]

    def meet(step: Any, total: Any) -> Any:
        first_key = order[step] * size
        block = pl.ds(first_key, size)
        key, value = keys[block, :], values[block, :]
        limits = of_queries, [limit[block][None, :] for limit in key_limits]
        scores = flash.masked_scores(rows, key, *limits, first_key, key_axis=1)
        return total + flash.query_gradient(scores, key, value, grad, saved)

    start = jnp.zeros((size, width), jnp.float32)
    total = jax.lax.fori_loop(0, count[...], meet, start)
    query_grad[...] = (total * scale).astype(query_grad.dtype)


def _key_kernel(order: Any, count: Any, *refs: Any) -> None:
    query_limits, key_limits, queries, key, value, out_grads, log_sums, inner, *results = refs
    key_grad, value_grad = results
    size, width = key.shape
    first_key, of_keys = pl.program_id(1) * size, [limit[...][:, None] for limit in key_limits]
    rows, weighed = key[...], value[...]

    def member(g: Any, totals: Any) -> Any:
        def meet(step: Any, totals: Any) -> Any:
            block = pl.ds(order[step] * size, size)
            query, grad = queries[g, block, :], out_grads[g, block, :]
            limits = [limit[block][None, :] for limit in query_limits], of_keys
            scores = flash.masked_scores(rows, query, *limits, first_key, key_axis=0)
            saved = log_sums[g, block][None, :], inner[g, block][None, :]
            grads = flash.key_value_gradients(scores, query, weighed, grad, saved)
            return totals[0] + grads[0], totals[1] + grads[1]

        return jax.lax.fori_loop(0, count[...], meet, totals)

    start = (jnp.zeros((size, width), jnp.float32), jnp.zeros((size, width), jnp.float32))
    totals = jax.lax.fori_loop(0, queries.shape[0], member, start)
    key_grad[...] = totals[0].astype(key_grad.dtype)
    value_grad[...] = totals[1].astype(value_grad.dtype)
