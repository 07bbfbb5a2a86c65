"""What the attention kernels for TPU and GPU share: blocks, who meets whom, the arithmetic of one.

The mask is `j <= index[i] < ends[j]` (blockwise.py): a number for each key says which later queries
see it. That is arXiv 2410.01359's column-wise mask, from which follows, without looking at single
pairs, which blocks of queries see anything of which blocks of keys. The recurrence is
arXiv 2205.14135's, the gradient in two passes, over the blocks of queries and over those of keys,
arXiv 2307.08691's: nothing is added up by two programs at once.

No kernel at hand takes such a mask. jax.nn.dot_product_attention, with cuDNN too, has lengths and
windows, and all else only as a T x T array. JAX's splash attention skips blocks of a mask that is
known before it compiles, or that is a T x T array; its segments cannot say that two branches see
their trunk and not each other. Tokamax's masks have an end for each key, but its TPU kernel refuses
it and its Triton kernel makes a T x T array of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lightning_jax.models.blockwise import MASKED, by_head, pad_to


class Blocks(NamedTuple):
    """The inputs by head, padded to whole blocks, and which blocks meet."""

    queries: Any  # [B K G T D], times D^-0.5
    keys: Any  # [B K C D]
    values: Any  # [B K C D]
    index: Any  # [B T]
    ends: Any  # [B C]
    met: Any  # [B T/size C/size]: whether some query sees some key
    size: int


def split(
    queries: Any, keys: Any, values: Any, index: Any, ends: Any, sizes: tuple[int, ...]
) -> Blocks:
    """Inputs [B T H D] and [B C K D] in blocks of the first of `sizes` that pads little."""
    kv_heads, scale = keys.shape[2], queries.shape[3] ** -0.5
    longest = max(queries.shape[1], keys.shape[1])
    size = next((s for s in sizes if -longest % s <= longest // 8), sizes[-1])
    # A padded query sees what the last one sees, so that it adds no blocks; a padded key is seen
    # by nobody.
    index = jnp.pad(index, ((0, 0), (0, -index.shape[1] % size)), mode="edge")
    ends = pad_to(ends, size, 1)
    return Blocks(
        queries=pad_to(by_head(queries * scale, kv_heads), size, 3),
        keys=pad_to(keys.transpose(0, 2, 1, 3), size, 2),
        values=pad_to(values.transpose(0, 2, 1, 3), size, 2),
        index=index,
        ends=ends,
        met=_met(index, ends, size),
        size=size,
    )


def split_gradient(blocks: Blocks, out: Any, log_sums: Any, out_grad: Any) -> tuple[Any, Any, Any]:
    """What the backward pass reads besides: `out_grad` [B K G T D], `log_sums` and, for each query,
    sum_j weight_j * dweight_j = out . out_grad, [B K G T]; padded with zeros."""
    kv_heads, size = blocks.keys.shape[1], blocks.size
    wide = out.astype(jnp.float32) * out_grad.astype(jnp.float32)
    inner = by_head(wide, kv_heads).sum(axis=-1)
    out_grads = pad_to(by_head(out_grad, kv_heads), size, 3)
    return out_grads, pad_to(log_sums, size, 3), pad_to(inner, size, 3)


def _met(index: Any, ends: Any, size: int) -> Any:
    lowest = index.reshape(index.shape[0], -1, size).min(axis=2)
    highest = index.reshape(index.shape[0], -1, size).max(axis=2)
    last_end = ends.reshape(ends.shape[0], -1, size).max(axis=2)
    first_key = jnp.arange(last_end.shape[1]) * size
    reached = first_key[None, None, :] <= highest[:, :, None]
    return reached & (lowest[:, :, None] < last_end[:, None, :])


def masked_scores(
    left: Any, right: Any, index: Any, ends: Any, first_key: Any, *, key_axis: int
) -> Any:
    """Scores [M C] of M query rows on C keys, or with `key_axis` 0 [C M] of keys on queries.

    The first key is row `first_key` of all; `index` and `ends` lie along their axis, the other is
    of size 1. Float32, MASKED where a key is not seen.
    """
    scores = product(left, right, 1, 1)
    keys = first_key + jax.lax.broadcasted_iota(jnp.int32, scores.shape, key_axis)
    return jnp.where((keys <= index) & (index < ends), scores, MASKED)


def per_device(
    kernel: Callable[..., Any], arrays: Sequence[Any], place: Callable[[Any], tuple[Any, Any]]
) -> Any:
    """What a kernel gives that each device calls for its part of the arrays.

    A compiler that splits a program does not split a kernel. The mesh is that of the arrays: JAX
    keeps it in the type of all that comes of arrays that lie on one. `place` says of it how the
    arguments and the results lie there.
    """
    mesh = jax.typeof(arrays[0]).sharding.mesh
    if mesh.empty or mesh.size == 1:
        return kernel(*arrays)
    inputs, outputs = place(mesh)
    # A kernel does not say along which axes its results vary.
    split = jax.shard_map(kernel, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    return split(*arrays)


class Sums(NamedTuple):
    """Of the keys that some queries have met: the online softmax, float32."""

    top: Any  # [M 1], the highest score
    total: Any  # [M 1], the sum of exp(score - top)
    out: Any  # [M D], the sum of those times the values

    @classmethod
    def start(cls, num_rows: int, width: int) -> "Sums":
        """Those of queries that have met none."""
        column = jnp.zeros((num_rows, 1), jnp.float32)
        return cls(column + MASKED, column, jnp.zeros((num_rows, width), jnp.float32))

    def add(self, scores: Any, value: Any) -> "Sums":
        """The sums with a block more: its `scores` [M C] and values [C D]."""
        top = jnp.maximum(self.top, scores.max(axis=1, keepdims=True))
        weights, shrink = jnp.exp(scores - top), jnp.exp(self.top - top)
        total = self.total * shrink + weights.sum(axis=1, keepdims=True)
        out = self.out * shrink + product(weights.astype(value.dtype), value, 1, 0)
        return Sums(top, total, out)


def query_gradient(scores: Any, key: Any, value: Any, out_grad: Any, saved: Any) -> Any:
    """What a block of keys adds to its queries' gradient [M D], over their scale; float32.

    `scores` are [M C]; `saved` the pair of `log_sums` and `inner` of `split_gradient`, [M 1].
    """
    log_sums, inner = saved
    grads = jnp.exp(scores - log_sums) * (product(out_grad, value, 1, 1) - inner)
    return product(grads.astype(key.dtype), key, 1, 0)


def key_value_gradients(
    scores: Any, query: Any, value: Any, out_grad: Any, saved: Any
) -> tuple[Any, Any]:
    """What a block of queries adds to its keys' and values' gradients, both [C D]; float32.

    As `query_gradient`, with all turned: `scores` are [C M] and those of `saved` [1 M].
    """
    log_sums, inner = saved
    weights = jnp.exp(scores - log_sums)
    grads = weights * (product(value, out_grad, 1, 1) - inner)
    value_grad = product(weights.astype(out_grad.dtype), out_grad, 1, 0)
    return product(grads.astype(query.dtype), query, 1, 0), value_grad


def product(left: Any, right: Any, left_axis: int, right_axis: int) -> Any:
    """The matrix product that sums over an axis of each; float32."""
    dims = (((left_axis,), (right_axis,)), ((), ()))
    # Products of narrower numbers are exact in float32, and a TPU's compiler refuses to be asked.
    precision = None if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        left, right, dims, precision=precision, preferred_element_type=jnp.float32
    )
