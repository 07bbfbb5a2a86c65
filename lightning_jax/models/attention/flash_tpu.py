"""Pallas attention kernels for TPU, which process one pair of flash.py's blocks per step.

Not yet run on hardware: interpreted on a CPU, and compiled for TPUs.

The pairs that meet are listed in scalar memory before a kernel starts. The kernel can then fetch
the blocks of the next pair while it computes with the current pair. A pair that does not meet is
not listed, so it costs no fetch and no step.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lightning_jax.models.attention import flash
from lightning_jax.models.attention.blockwise import (
    MASKED,
    Blocks,
    Window,
    by_token,
    split_blocks,
)
from lightning_jax.models.attention.flash import Sums

_SIZES = (512, 256, 128)  # rows of a block; 512 x 512 scores are 1 MiB of a core's memory
_BITS = 16  # low bits of a pair's number, which hold its inner block
_INPUTS = ("query", "key", "key")
_GRADIENT_INPUTS = (*_INPUTS, "query", "number", "number")


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
    b = split_blocks(queries, keys, values, index, ends, window, _SIZES)
    numbers = jax.ShapeDtypeStruct((*b.queries.shape[:3], 1, b.queries.shape[3]), jnp.float32)
    column = pltpu.VMEM((b.size, 1), jnp.float32)
    outs, log_sums = _run(
        _forward_kernel,
        b,
        outputs=[("query", b.queries), ("number", numbers)],
        scratch=[column, column, _accumulator(b)],
        interpret=interpret,
    )
    return by_token(outs)[:, : queries.shape[1]], log_sums[..., 0, : queries.shape[1]]


def backward(
    queries: Any, keys: Any, values: Any, *rest: Any, interpret: bool = False
) -> tuple[Any, Any, Any]:
    """Return the gradients of queries, keys and values.

    `rest` is the other inputs of `forward`, its two results and the gradient of the first.
    """
    index, ends, window, out, log_sums, out_grad = rest
    b = split_blocks(queries, keys, values, index, ends, window, _SIZES)
    out_grads, *numbers = flash.split_gradient(b, out, log_sums, out_grad)
    more = [out_grads, *(number[..., None, :] for number in numbers)]
    (query_grads,) = _run(
        functools.partial(_query_kernel, scale=queries.shape[3] ** -0.5),
        b,
        more,
        outputs=[("query", b.queries)],
        scratch=[_accumulator(b)],
        interpret=interpret,
    )
    grads = _run(
        _key_kernel,
        b,
        more,
        outputs=[("key", b.keys), ("key", b.values)],
        scratch=[_accumulator(b)] * 2,
        by_key=True,
        interpret=interpret,
    )
    key_grads, value_grads = (x.transpose(0, 2, 1, 3)[:, : keys.shape[1]] for x in grads)
    return by_token(query_grads)[:, : queries.shape[1]], key_grads, value_grads


def _accumulator(b: Blocks) -> Any:
    return pltpu.VMEM((b.size, b.queries.shape[4]), jnp.float32)


def _run(
    kernel: Callable[..., None],
    b: Blocks,
    more: Sequence[Any] = (),
    *,
    outputs: Sequence[tuple[str, Any]],
    scratch: Sequence[Any],
    by_key: bool = False,
    interpret: bool,
) -> Any:
    """Run a kernel and return its outputs, each described by a kind of block and an array like it.

    For each row and head it visits the pairs that meet, one block of queries after another. With
    `by_key` it goes through the blocks of keys, and visits each pair once per query head. The
    number of steps is found at run time. `more` is [B K G T D] and two numbers per query,
    [B K G 1 T].
    """
    pairs, counts = list_pairs(b.visible.swapaxes(1, 2) if by_key else b.visible)
    rows, kv_heads, group = b.queries.shape[:3]
    walk = (counts.max(), group) if by_key else (group, counts.max())
    specs = _specs(b, by_key)
    kinds = zip(("query_limit", "key_limit"), b.limits, strict=True)
    in_specs = [tuple(specs[kind] for _ in numbers) for kind, numbers in kinds]
    in_specs += [specs[kind] for kind in (_GRADIENT_INPUTS if more else _INPUTS)]
    limits = [tuple(numbers[:, None] for numbers in side) for side in b.limits]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, kv_heads, *walk),
            in_specs=in_specs,
            out_specs=[specs[kind] for kind, _ in outputs],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype) for _, like in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
        ),
        interpret=interpret,
    )(pairs, counts, *limits, b.queries, b.keys, b.values, *more)


def list_pairs(visible: Any) -> tuple[Any, Any]:
    """Return the numbers [B N*M] of the pairs that meet, by outer block, and their counts [B].

    A pair's number is outer * 2^16 + inner. An outer block that meets none is paired with block 0,
    so that its output is written. The last pair is repeated to the end, which costs no fetch.
    """
    rows, outer, inner = visible.shape
    alone = ~visible.any(axis=2, keepdims=True)
    visible = (visible | (alone & (jnp.arange(inner) == 0)[None, None, :])).reshape(rows, -1)
    counts = visible.sum(axis=1, dtype=jnp.int32)
    index = jnp.minimum(jnp.arange(outer * inner)[None, :], counts[:, None] - 1)
    listed = jnp.take_along_axis(jnp.argsort(~visible, axis=1, stable=True), index, axis=1)
    return ((listed // inner << _BITS) + listed % inner).astype(jnp.int32), counts


def _specs(b: Blocks, by_key: bool) -> dict[str, pl.BlockSpec]:
    """Return the block specs that select, for each kind of array, what a step reads or writes."""

    def spec(
        shape: tuple[int | None, ...], block_index: Callable[..., tuple[Any, ...]]
    ) -> pl.BlockSpec:
        def index_map(row: Any, head: Any, first: Any, second: Any, pairs: Any, _: Any) -> Any:
            step, member = (first, second) if by_key else (second, first)
            outer, inner = split_pair(pairs[row, step])
            query, key = (inner, outer) if by_key else (outer, inner)
            return block_index(row, head, member, query, key)

        return pl.BlockSpec(shape, index_map)

    size, width = b.size, b.queries.shape[4]
    return {
        "query_limit": spec((None, 1, size), lambda row, head, member, query, key: (row, 0, query)),
        "key_limit": spec((None, 1, size), lambda row, head, member, query, key: (row, 0, key)),
        "query": spec((None, None, None, size, width), lambda *block: (*block[:4], 0)),
        "number": spec((None, None, None, 1, size), lambda *block: (*block[:3], 0, block[3])),
        "key": spec((None, None, size, width), lambda *block: (*block[:2], block[4], 0)),
    }


class Step(NamedTuple):
    """Position of a kernel in its list of pairs."""

    inner: Any  # the inner block
    outer: Any
    meets: Any  # False past the end of the list; rows with fewer pairs end earlier
    is_first: Any  # for its outer block
    is_last: Any


def step_of(pairs: Any, counts: Any, row: Any, step: Any) -> Step:
    """Return the kernel's position at this step of the row's list of pairs."""
    last = counts[row] - 1
    outer, inner = split_pair(pairs[row, step])
    before, _ = split_pair(pairs[row, jnp.maximum(step - 1, 0)])
    after, _ = split_pair(pairs[row, jnp.minimum(step + 1, last)])
    meets = step <= last
    return Step(
        inner=inner,
        outer=outer,
        meets=meets,
        is_first=(step == 0) | (outer != before),
        is_last=meets & ((step == last) | (outer != after)),
    )


def split_pair(pair: Any) -> tuple[Any, Any]:
    """Return the outer and the inner block of a pair's number from `list_pairs`."""
    return pair >> _BITS, pair & (2**_BITS - 1)


def _forward_kernel(pairs: Any, counts: Any, *refs: Any) -> None:
    query_limits, key_limits, query, key, value, out, log_sums, *scratch = refs
    step = step_of(pairs, counts, pl.program_id(0), pl.program_id(3))
    sums = Sums(*scratch)

    @pl.when(step.is_first)
    def _start() -> None:
        sums.top[...] = jnp.full(sums.top.shape, MASKED, jnp.float32)
        sums.total[...] = jnp.zeros(sums.total.shape, jnp.float32)
        sums.out[...] = jnp.zeros(sums.out.shape, jnp.float32)

    @pl.when(step.meets)
    def _meet() -> None:
        scores = _scores(query, key, query_limits, key_limits, step.inner)
        added = Sums(*(ref[...] for ref in sums)).add(scores, value[...])
        for ref, new in zip(sums, added, strict=True):
            ref[...] = new

    @pl.when(step.is_last)
    def _finish() -> None:
        out[...] = (sums.out[...] / sums.total[...]).astype(out.dtype)
        log_sums[0] = (sums.top[...] + jnp.log(sums.total[...]))[:, 0]


def _query_kernel(pairs: Any, counts: Any, *refs: Any, scale: float) -> None:
    query_limits, key_limits, query, key, value, *rest, query_grad, total = refs
    out_grad, log_sums, inner = rest
    step = step_of(pairs, counts, pl.program_id(0), pl.program_id(3))

    @pl.when(step.is_first)
    def _start() -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)

    @pl.when(step.meets)
    def _meet() -> None:
        scores = _scores(query, key, query_limits, key_limits, step.inner)
        saved = _column(log_sums), _column(inner)
        total[...] += flash.query_gradient(scores, key[...], value[...], out_grad[...], saved)

    @pl.when(step.is_last)
    def _finish() -> None:
        query_grad[...] = (total[...] * scale).astype(query_grad.dtype)


def _key_kernel(pairs: Any, counts: Any, *refs: Any) -> None:
    query_limits, key_limits, query, key, value, out_grad, log_sums, inner, *results = refs
    key_grad, value_grad, key_total, value_total = results
    step = step_of(pairs, counts, pl.program_id(0), pl.program_id(2))
    member = pl.program_id(3)

    @pl.when(step.is_first & (member == 0))
    def _start() -> None:
        key_total[...] = jnp.zeros(key_total.shape, jnp.float32)
        value_total[...] = jnp.zeros(value_total.shape, jnp.float32)

    @pl.when(step.meets)
    def _meet() -> None:
        first_key, keys, queries = step.outer * key.shape[0], key[...], query[...]
        limits = [limit[...] for limit in query_limits], [_column(limit) for limit in key_limits]
        scores = flash.masked_scores(keys, queries, *limits, first_key, key_axis=0)
        saved = log_sums[...], inner[...]
        grads = flash.key_value_gradients(scores, query[...], value[...], out_grad[...], saved)
        key_total[...] += grads[0]
        value_total[...] += grads[1]

    @pl.when(step.is_last & (member == pl.num_programs(3) - 1))
    def _finish() -> None:
        key_grad[...] = key_total[...].astype(key_grad.dtype)
        value_grad[...] = value_total[...].astype(value_grad.dtype)


def _scores(query: Any, key: Any, query_limits: Any, key_limits: Any, key_block: Any) -> Any:
    first_key, queries, keys = key_block * key.shape[0], query[...], key[...]
    limits = [_column(limit) for limit in query_limits], [limit[...] for limit in key_limits]
    return flash.masked_scores(queries, keys, *limits, first_key, key_axis=1)


def _column(numbers: Any) -> Any:
    """Reshape a block [1 M] of numbers to [M 1]."""
    return jnp.expand_dims(numbers[0], 1)
