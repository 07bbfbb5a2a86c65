"""Shared parts of the TPU and GPU attention kernels: blocks, visible pairs, arithmetic of a block.

The kernels were interpreted on a CPU, run on an NVIDIA H200 and compiled for TPUs.

The mask is `j <= index[i] < ends[j]` (blockwise.py): one number for each key gives the later
queries that see it. This is the column-wise mask of arXiv 2410.01359. A window compares one more
number of each query with one of each key. These numbers show which blocks of queries see part of
which blocks of keys, without looking at single pairs. The recurrence is from arXiv 2205.14135. The
gradient in two passes, over blocks of queries and over blocks of keys, is from arXiv 2307.08691. No
two programs add to the same output.

No existing kernel skips blocks by such a mask. jax.nn.dot_product_attention, with cuDNN too, takes
lengths and windows, and any other mask only as a T x T array. JAX's splash attention skips blocks
only if the mask is known at compile time or is a T x T array. Its segments cannot express two
branches that see their trunk but not each other. Tokamax's masks have an end for each key. Its TPU
kernel rejects such a mask, and its GPU kernels expand it to a T x T array (flash_tokamax.py).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lightning_jax.models.attention.blockwise import MASKED, Blocks, by_head, pad_to


def split_gradient(blocks: Blocks, out: Any, log_sums: Any, out_grad: Any) -> tuple[Any, Any, Any]:
    """Return the extra inputs of the backward pass, padded with zeros.

    They are `out_grad` [B K G T D], `log_sums` [B K G T] and, for each query,
    sum_j weight_j * dweight_j = out . out_grad, [B K G T].
    """
    kv_heads, size = blocks.keys.shape[1], blocks.size
    wide = out.astype(jnp.float32) * out_grad.astype(jnp.float32)
    inner = by_head(wide, kv_heads).sum(axis=-1)
    out_grads = pad_to(by_head(out_grad, kv_heads), size, 3)
    return out_grads, pad_to(log_sums, size, 3), pad_to(inner, size, 3)


def masked_scores(
    left: Any,
    right: Any,
    query_limits: Sequence[Any],
    key_limits: Sequence[Any],
    first_key: Any,
    *,
    key_axis: int,
) -> Any:
    """Return scores [M C] of M query rows on C keys, or [C M] with `key_axis` 0.

    `first_key` is the index of the first key in the whole row. The limits are those of the blocks
    (`Blocks.limits`). They run along the query and the key axis, and their other axis has size 1.
    Scores are float32, MASKED if a key is not seen.
    """
    (index, *first), (ends, *depths) = query_limits, key_limits
    scores = product(left, right, 1, 1)
    keys = first_key + jax.lax.broadcasted_iota(jnp.int32, scores.shape, key_axis)
    seen = (keys <= index) & (index < ends)
    if first:
        seen &= first[0] <= depths[0]
    return jnp.where(seen, scores, MASKED)


@functools.cache
def per_device(
    kernel: Callable[..., Any], partition_specs: Callable[..., tuple[Any, Any]]
) -> Callable[..., Any]:
    """Return a function that runs a kernel on each device for its part of the arrays.

    A compiler that partitions a program does not partition a kernel. The mesh comes from the type
    of the arrays, where JAX keeps it for everything computed from sharded arrays. `partition_specs`
    takes the mesh and the arrays, and returns the specs of the arguments and of the results. The
    function is jitted, so that it is traced once for all layers of a model.
    """

    @jax.jit
    def run(*arrays: Any) -> Any:
        mesh = jax.typeof(arrays[0]).sharding.mesh
        if mesh.empty or mesh.size == 1:
            return kernel(*arrays)
        inputs, outputs = partition_specs(mesh, *arrays)
        # A kernel does not declare along which mesh axes its results vary.
        options = {"mesh": mesh, "in_specs": inputs, "out_specs": outputs, "check_vma": False}
        return jax.shard_map(kernel, **options)(*arrays)

    return run


class Sums(NamedTuple):
    """State of the online softmax over the keys that some queries have met, in float32.

    The methods take M queries of one key head. The arrays may have axes before these.
    """

    top: Any  # [M 1], the highest score
    total: Any  # [M 1], the sum of exp(score - top)
    out: Any  # [M D], the sum of exp(score - top) times the values

    @classmethod
    def start(cls, num_rows: int, width: int) -> "Sums":
        """Return the state of queries that have met no keys."""
        column = jnp.zeros((num_rows, 1), jnp.float32)
        return cls(column + MASKED, column, jnp.zeros((num_rows, width), jnp.float32))

    def add(self, scores: Any, value: Any) -> "Sums":
        """Add a block of keys with `scores` [M C] and values [C D]."""
        top = jnp.maximum(self.top, scores.max(axis=1, keepdims=True))
        weights, shrink = jnp.exp(scores - top), jnp.exp(self.top - top)
        total = self.total * shrink + weights.sum(axis=1, keepdims=True)
        out = self.out * shrink + product(weights.astype(value.dtype), value, 1, 0)
        return Sums(top, total, out)


def query_gradient(scores: Any, key: Any, value: Any, out_grad: Any, saved: Any) -> Any:
    """Return what a block of keys adds to its queries' gradient [M D], before scaling; float32.

    `scores` are [M C]. `saved` is the pair of `log_sums` and `inner` from `split_gradient`, [M 1].
    """
    log_sums, inner = saved
    grads = jnp.exp(scores - log_sums) * (product(out_grad, value, 1, 1) - inner)
    return product(grads.astype(key.dtype), key, 1, 0)


def key_value_gradients(
    scores: Any, query: Any, value: Any, out_grad: Any, saved: Any
) -> tuple[Any, Any]:
    """Return what a block of queries adds to its keys' and values' gradients [C D], in float32.

    Like `query_gradient`, but transposed: `scores` are [C M] and both arrays of `saved` are [1 M].
    """
    log_sums, inner = saved
    weights = jnp.exp(scores - log_sums)
    grads = weights * (product(value, out_grad, 1, 1) - inner)
    value_grad = product(weights.astype(out_grad.dtype), out_grad, 1, 0)
    return product(grads.astype(query.dtype), query, 1, 0), value_grad


def product(left: Any, right: Any, left_axis: int, right_axis: int) -> Any:
    """Return the matrix product that contracts one axis of each array, in float32."""
    dims = (((left_axis,), (right_axis,)), ((), ()))
    # Products of narrower numbers are exact in float32, and the TPU compiler rejects a precision
    # for them.
    precision = None if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        left, right, dims, precision=precision, preferred_element_type=jnp.float32
    )
