"""Sums over the targets of each call. These are contiguous in a row, so a row is a list of calls:

calls        4   4   4   7   7  -1
values       1   2   3   4   5   0
call_sums    6   6   6   9   9   0
sums_to_go   6   5   3   9   5   0
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def call_sums(values: Float[Array, "B R"], calls: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """Return at each target the sum over the targets of its call."""
    segments = jnp.cumsum(_starts(calls).astype(jnp.int32), axis=1) - 1

    def one_row(values: Float[Array, " R"], segments: Int[Array, " R"]) -> Float[Array, " R"]:
        return jax.ops.segment_sum(values, segments, num_segments=len(values))[segments]

    return jax.vmap(one_row)(values, segments)


def call_means(
    values: Float[Array, "B R"], calls: Int[Array, "B R"], mask: Bool[Array, "B R"]
) -> Float[Array, "B R"]:
    """Return at each target the mean over its call's targets; `values` must be 0 where masked."""
    counts = call_sums(mask.astype(jnp.float32), calls)
    return call_sums(values, calls) / jnp.maximum(counts, 1.0)


def sums_to_go(values: Float[Array, "B R"], calls: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """Return at each target the sum over it and the later targets of its call."""
    is_last = _starts(calls[:, ::-1])[:, ::-1]

    # Of two neighbouring ranges, the left one adds the sum at the start of the right one, unless
    # it ends its call. A reverse scan passes the right range first.
    def join(right: tuple[Array, Array], left: tuple[Array, Array]) -> tuple[Array, Array]:
        total, ends = left
        return jnp.where(ends, total, total + right[0]), ends | right[1]

    return jax.lax.associative_scan(join, (values, is_last), reverse=True, axis=1)[0]


def _starts(calls: Int[Array, "B R"]) -> Bool[Array, "B R"]:
    """Return a mask of targets whose call index differs from that of the target before."""
    first = jnp.ones_like(calls[:, :1], dtype=jnp.bool_)
    return jnp.concatenate([first, calls[:, 1:] != calls[:, :-1]], axis=1)
