"""Block-by-block softmax attention that allocates no T x T array and skips fully masked blocks.

Query i has an index and key j has an end. Query i sees key j iff `j <= index[i] < ends[j]`. This
mask describes the forest in a training row (index[i] = i). With endless keys it describes reading
a cache (index[i] = position). A `Window` hides ancestors that are further up. The number of blocks
in the loop is found at run time, so a row packed with short trees costs only what those trees cost.
The online softmax is arXiv 1805.02867. Its gradient, which does not store the scores, is arXiv
2205.14135.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a query that sees no key gives finite numbers instead of NaN
ENDLESS = 2**30  # the end of a key that every later query sees


class Window(NamedTuple):
    """Depths in a tree: query i of a window sees key j only if `first[i] <= depths[j]`.

    Depths count from the root. Among the ancestors of a node there is one of each smaller depth.
    """

    first: Any  # [B T], the smallest depth that each query sees; may be negative
    depths: Any  # [B C], of each key

    @classmethod
    def of(cls, depths: Any, size: int) -> "Window":
        """Return the window in which a node sees `size` nodes: itself and those before it."""
        return cls(depths - (size - 1), depths)


class Blocks(NamedTuple):
    """Inputs by head, padded to whole blocks, and the block pairs that meet."""

    queries: Any  # [B K G T D], times D^-0.5
    keys: Any  # [B K C D]
    values: Any  # [B K C D]
    index: Any  # [B T]
    ends: Any  # [B C]
    window: Window | None
    visible: Any  # [B T/size C/size]: True if any query of the block sees any key of the other
    size: int

    @property
    def limits(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Numbers of each query and of each key that say which keys are seen."""
        if self.window is None:
            return (self.index,), (self.ends,)
        return (self.index, self.window.first), (self.ends, self.window.depths)


def split_blocks(
    queries: Any,
    keys: Any,
    values: Any,
    index: Any,
    ends: Any,
    window: Window | None,
    sizes: tuple[int, ...],
) -> Blocks:
    """Split inputs [B T H D] and [B C K D] into blocks of the first of `sizes` that pads little."""
    kv_heads, scale = keys.shape[2], queries.shape[3] ** -0.5
    longest = max(queries.shape[1], keys.shape[1])
    size = next((s for s in sizes if -longest % s <= longest // 8), sizes[-1])
    # A padded query sees the same keys as the last query, so it adds no blocks. No query sees a
    # padded key.
    index = _pad_with_last(index, size)
    ends = pad_to(ends, size, 1)
    if window is not None:
        window = Window(*(_pad_with_last(numbers, size) for numbers in window))
    return Blocks(
        queries=pad_to(by_head(queries * scale, kv_heads), size, 3),
        keys=pad_to(keys.transpose(0, 2, 1, 3), size, 2),
        values=pad_to(values.transpose(0, 2, 1, 3), size, 2),
        index=index,
        ends=ends,
        window=window,
        visible=_visible_blocks(index, ends, window, size),
        size=size,
    )


def _pad_with_last(numbers: Any, size: int) -> Any:
    return jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % size)), mode="edge")


def _visible_blocks(index: Any, ends: Any, window: Window | None, size: int) -> Any:
    lowest = index.reshape(index.shape[0], -1, size).min(axis=2)
    highest = index.reshape(index.shape[0], -1, size).max(axis=2)
    last_end = ends.reshape(ends.shape[0], -1, size).max(axis=2)
    first_key = jnp.arange(last_end.shape[1]) * size
    reached = first_key[None, None, :] <= highest[:, :, None]
    visible = reached & (lowest[:, :, None] < last_end[:, None, :])
    if window is None:
        return visible
    first = window.first.reshape(index.shape[0], -1, size).min(axis=2)
    deepest = window.depths.reshape(ends.shape[0], -1, size).max(axis=2)
    return visible & (first[:, :, None] <= deepest[:, None, :])


def _key_blocks(blocks: Blocks) -> tuple[Any, Any]:
    """Return the key blocks of each query block, visible ones first, and their number."""
    visible = blocks.visible.any(axis=0)
    return jnp.argsort(~visible, axis=1, stable=True), visible.sum(axis=1)


def forward(
    queries: Any,
    keys: Any,
    values: Any,
    index: Any,
    ends: Any,
    window: Window | None,
    *,
    size: int,
) -> Any:
    """Return the output [B T H D] and the log-sum-exp [B K G T] of each query's scores."""
    b = split_blocks(queries, keys, values, index, ends, window, (size,))
    order, count = _key_blocks(b)
    grouped = b.queries.shape[:3]

    def query_block(i: Any, carry: Any) -> Any:
        def key_block(t: Any, carry: Any) -> Any:
            top, total, out = carry
            j = order[i, t]
            scores = _scores(b, i, j)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            part = _product("kmc,kcd->kmd", weights, _cut(b.values, j, size, 2))
            out = out * shrink[..., None] + part
            return new_top, total * shrink + weights.sum(axis=-1), out

        start = (
            jnp.full((*grouped, size), MASKED, jnp.float32),
            jnp.zeros((*grouped, size), jnp.float32),
            jnp.zeros((*grouped, size, queries.shape[3]), jnp.float32),
        )
        top, total, out = jax.lax.fori_loop(0, count[i], key_block, start)
        outs, log_sums = carry
        out = (out / total[..., None]).astype(outs.dtype)
        return _put(outs, out, i, size, 3), _put(log_sums, top + jnp.log(total), i, size, 3)

    log_sums = jnp.zeros(b.queries.shape[:4], jnp.float32)
    carry = (jnp.zeros_like(b.queries), log_sums)
    outs, log_sums = jax.lax.fori_loop(0, order.shape[0], query_block, carry)
    length = queries.shape[1]
    return by_token(outs)[:, :length], log_sums[..., :length]


def backward(queries: Any, keys: Any, values: Any, *rest: Any, size: int) -> Any:
    """Return the gradients of queries, keys and values, recomputing weights from `log_sums`."""
    index, ends, window, out, log_sums, out_grad = rest
    b = split_blocks(queries, keys, values, index, ends, window, (size,))
    order, count = _key_blocks(b)
    kv_heads, scale = keys.shape[2], queries.shape[3] ** -0.5
    out_grads = pad_to(by_head(out_grad, kv_heads), size, 3)
    # Softmax's gradient needs, for each query, sum_j weight_j * dweight_j = out . out_grad.
    # An einsum, because XLA on a CPU takes seven times as long for a sum over this last axis.
    wide = pad_to(by_head(out, kv_heads), size, 3).astype(jnp.float32)
    inner = jnp.einsum("bkgtd,bkgtd->bkgt", wide, out_grads.astype(jnp.float32))
    log_sums = pad_to(log_sums, size, 3)

    def query_block(i: Any, carry: Any) -> Any:
        query, grad = _cut(b.queries, i, size, 3), _cut(out_grads, i, size, 3)
        by_feature = _turned(query), _turned(grad)

        def key_block(t: Any, carry: Any) -> Any:
            query_grad, key_grads, value_grads = carry
            j = order[i, t]
            key, value = _cut(b.keys, j, size, 2), _cut(b.values, j, size, 2)
            weights = jnp.exp(_scores(b, i, j) - _cut(log_sums, i, size, 3)[..., None])
            weights_grad = _product("kmd,kcd->kmc", grad, value)
            scores_grad = weights * (weights_grad - _cut(inner, i, size, 3)[..., None])
            query_grad = query_grad + _product("kmc,kcd->kmd", scores_grad, key)
            key_grad = _cut(key_grads, j, size, 3) + _over_queries(by_feature[0], scores_grad)
            value_grad = _cut(value_grads, j, size, 3) + _over_queries(by_feature[1], weights)
            return (
                query_grad,
                _put(key_grads, key_grad, j, size, 3),
                _put(value_grads, value_grad, j, size, 3),
            )

        query_grads, key_grads, value_grads = carry
        start = (jnp.zeros(query.shape, jnp.float32), key_grads, value_grads)
        query_grad, *rest = jax.lax.fori_loop(0, count[i], key_block, start)
        return _put(query_grads, query_grad, i, size, 3), *rest

    shapes = b.queries.shape, *(x.swapaxes(2, 3).shape for x in (b.keys, b.values))
    zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    grads = jax.lax.fori_loop(0, order.shape[0], query_block, zeros)
    query_grads = by_token(grads[0])[:, : queries.shape[1]] * scale
    key_grads, value_grads = (x.transpose(0, 3, 1, 2)[:, : keys.shape[1]] for x in grads[1:])
    return (
        query_grads.astype(queries.dtype),
        key_grads.astype(keys.dtype),
        value_grads.astype(values.dtype),
    )


def _scores(b: Blocks, i: Any, j: Any) -> Any:
    """Return float32 scores [B K G size size] of query block i on key block j, MASKED if unseen."""
    scores = _product("kmd,kcd->kmc", _cut(b.queries, i, b.size, 3), _cut(b.keys, j, b.size, 2))
    index, ends = _cut(b.index, i, b.size, 1), _cut(b.ends, j, b.size, 1)
    key = j * b.size + jnp.arange(b.size)
    seen = (key[None, None, :] <= index[:, :, None]) & (index[:, :, None] < ends[:, None, :])
    if b.window is not None:
        first, depths = (
            _cut(numbers, block, b.size, 1) for numbers, block in zip(b.window, (i, j), strict=True)
        )
        seen &= first[:, :, None] <= depths[:, None, :]
    return jnp.where(seen[:, None, None], scores, MASKED)


def _product(form: str, grouped: Any, shared: Any) -> Any:
    """Multiply with keys or values that G query heads share, as one matrix of G*T rows."""
    flat = grouped.reshape(*grouped.shape[:2], -1, grouped.shape[-1]).astype(shared.dtype)
    form = ",".join("b" + part for part in form.split("->")[0].split(",")) + "->b" + form[-3:]
    out = jnp.einsum(form, flat, shared, preferred_element_type=jnp.float32)
    return out.reshape(*grouped.shape[:-1], out.shape[-1])


def _over_queries(by_feature: Any, weights: Any) -> Any:
    """Sum weight times row over all queries of a key's group, for each key: [B K D C].

    XLA on a CPU takes twice as long for [B K C D], because it would transpose the weights.
    """
    flat = weights.reshape(*weights.shape[:2], -1, weights.shape[-1]).astype(by_feature.dtype)
    return jnp.einsum("bkdm,bkmc->bkdc", by_feature, flat, preferred_element_type=jnp.float32)


def _turned(grouped: Any) -> Any:
    """Reshape [B K G T D] to [B K D G*T]."""
    flat = grouped.reshape(*grouped.shape[:2], -1, grouped.shape[-1])
    return flat.transpose(0, 1, 3, 2)


def by_head(x: Any, kv_heads: int) -> Any:
    """Reshape [B T H D] to [B K G T D]."""
    split = x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, x.shape[3])
    return split.transpose(0, 2, 3, 1, 4)


def by_token(x: Any) -> Any:
    """Reshape [B K G T D] to [B T H D]."""
    rows, kv_heads, group, length, size = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(rows, length, kv_heads * group, size)


def pad_to(x: Any, size: int, axis: int) -> Any:
    """Pad `x` with zeros along an axis, up to a multiple of `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths)


def _cut(x: Any, block: Any, size: int, axis: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _put(x: Any, part: Any, block: Any, size: int, axis: int) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(x, part, block * size, axis)
