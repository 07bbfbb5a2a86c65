"""Attention kernels of the library tokamax, for rows of trees on Hopper and Blackwell GPUs.

The extra `tokamax` installs the library. attention.py takes these kernels where they support the
device and the arrays, and flash_gpu.py otherwise. They were compiled for an H100, but have not run
on a GPU. A CPU ran tokamax's XLA implementation with the same mask and sums. JAX's interpreter for
such kernels cannot run them (0.11.2 and 0.12.0.1).

tokamax expands the ends of keys to T x T bytes for each row, which XLA makes anew in each layer.
Its forward kernel skips blocks of keys after their queries or before the root of the queries'
trees. Its backward kernels skip only those after, so a row of many small trees costs them as much
as one large tree.

The public function of tokamax takes no ends and returns no sums of the softmax. The modules used
here are private, so the extra pins one version.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.backend import get_default_device

from lightning_jax.models.attention.blockwise import Window, pad_to
from lightning_jax.models.tokamax_library import can_import, conventions

_SIZE = 128  # rows are padded to a multiple, because the kernels read their mask in tiles
_LONGEST = 8192  # the mask of a longer row would take more than 64 MiB, twice when going backward
_WIDEST = 128  # head size; some wider ones do not fit in a Blackwell GPU
_MODULES = "tokamax._src.ops.attention"


def is_supported(queries: Any, window: Window | None = None) -> bool:
    """Return whether tokamax has kernels for these queries and JAX's default device.

    Forward and backward kernels need 16-bit numbers and a GPU of compute capability 9 or 10. They
    have no windows: tokamax's go by index, and those of a forest by depth.
    """
    device = get_default_device()
    return (
        window is None
        and queries.dtype == jnp.bfloat16
        and queries.shape[1] <= _LONGEST
        and queries.shape[3] <= _WIDEST
        and device.platform == "gpu"
        and 9 <= float(getattr(device, "compute_capability", 0)) < 11
        and is_installed()
    )


def is_installed() -> bool:
    """Return whether the kernels can be imported. Warn if tokamax is there and they cannot."""
    return can_import(f"{_MODULES}.pallas_mosaic_gpu", "attention uses the Triton kernels")


def forward(
    queries: Any,
    keys: Any,
    values: Any,
    index: Any,
    ends: Any,
    window: None,
    *,
    interpret: bool = False,
) -> tuple[Any, Any]:
    """Return the output [B T H D] and the log-sum-exp [B K G T] of each query's scores.

    Query i has index i. With `interpret` tokamax's XLA implementation runs instead of a kernel.
    """
    rows, length, heads, _ = queries.shape
    kv_heads = keys.shape[2]
    *arrays, ends = _pad(queries, keys, values, ends)
    mask = _mask(q_end=ends[:, None], k_start=_roots(ends)[:, None])
    with conventions():
        out, (top, total) = _operation(interpret)(*arrays, mask=mask, return_residuals=True)
    log_sums = (top + jnp.log(total))[..., :length]
    return out[:, :length], log_sums.reshape(rows, kv_heads, heads // kv_heads, length)


def backward(
    queries: Any, keys: Any, values: Any, *rest: Any, interpret: bool = False
) -> tuple[Any, Any, Any]:
    """Return the gradients of queries, keys and values.

    `rest` is the other inputs of `forward`, its two results and the gradient of the first.
    """
    _, ends, _, out, log_sums, out_grad = rest
    operation = _operation(interpret)
    rows, length, heads, _ = queries.shape
    *arrays, ends = _pad(queries, keys, values, ends)
    out, out_grad = (pad_to(array, _SIZE, 1) for array in (out, out_grad))
    # A weight is exp(score - top) / total. The total is in log_sums already.
    top = pad_to(log_sums.reshape(rows, heads, length), _SIZE, 2)
    sums = (top, jnp.ones_like(top))
    # Without roots, which would save no block here and cost a comparison for each pair.
    bound = operation.bind(*arrays, mask=_mask(q_end=ends[:, None]))
    options = {name: value for name, value in bound.kwargs.items() if name != "return_residuals"}
    with conventions():
        grads = operation.vjp(sums, out, out_grad, *bound.args, **options)
    return grads["q"][:, :length], grads["k"][:, :length], grads["v"][:, :length]


def _pad(queries: Any, keys: Any, values: Any, ends: Any) -> tuple[Any, ...]:
    """Pad rows to whole blocks with nodes that see only themselves."""
    length, missing = ends.shape[1], -ends.shape[1] % _SIZE
    alone = jnp.arange(length + 1, length + missing + 1, dtype=ends.dtype)
    alone = jnp.broadcast_to(alone, (ends.shape[0], missing))
    # The end of a node of the row may be beyond the row.
    ends = jnp.concatenate((jnp.minimum(ends, length), alone), axis=1)
    return *(pad_to(array, _SIZE, 1) for array in (queries, keys, values)), ends


def _roots(ends: Any) -> Any:
    """Return for each node the root of its tree: the last node before which all trees have ended.

    No node sees another before its root.
    """
    reached = jax.lax.cummax(ends, axis=1)
    index = jnp.broadcast_to(jnp.arange(ends.shape[1], dtype=ends.dtype), ends.shape)
    before = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(before <= index, index, 0), axis=1)


def _mask(**bounds: Any) -> Any:
    return _module("base").Mask(is_causal=True, **bounds)


@functools.cache
def _operation(interpret: bool) -> Any:
    if interpret:
        base = _module("base")
        return base.DotProductAttention(vjp=base.DotProductAttentionVjp())
    return _module("pallas_mosaic_gpu").PallasMosaicGpuFlashAttention()


def _module(name: str) -> Any:
    return importlib.import_module(f"{_MODULES}.{name}")
