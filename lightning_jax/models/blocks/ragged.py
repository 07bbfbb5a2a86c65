"""Products of sorted rows, of which each group has a kernel of its own.

A CPU loops over blocks of rows of one group. There `jax.lax.ragged_dot` multiplies every row by
every kernel (64 kernels cost 65 times the operations of one). It does so on NVIDIA GPUs too, so
other devices use the kernels of the library tokamax if the extra `tokamax` is installed. These have
not run on a GPU or a TPU. A CPU ran tokamax's XLA implementation.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.backend import get_default_device
from jaxtyping import Array, Float, Int32

from lightning_jax.models.blocks.matmul import product
from lightning_jax.models.tokamax_library import can_import, conventions

Rows = Float[Array, "R I"]
Kernels = Float[Array, "N I O"]
Sizes = Int32[Array, " N"]
# Rows of a block on a CPU, by the number of all rows. A block has one kernel, so a group's last
# block is partly wasted. Few rows have small groups. For 32 kernels [512, 384] on two cores, 8 rows
# take 0.26 ms, as with copies of their kernels. 1,024 take 6 ms, 1.6 times one dense product.
_BLOCKS = ((64, 4), (512, 8), (8192, 32))
_LARGEST_BLOCK = 128


def ragged_matmul(rows: Rows, kernels: Kernels, sizes: Sizes) -> Float[Array, "R O"]:
    """Return the product of each row with the kernel of its group, in the dtype of the rows.

    The rows are those of group 0, then those of group 1, and so on. `sizes` has their numbers. Rows
    after the last group give 0. A side in float32 is rounded to bfloat16 for one in bfloat16, and
    the sums are float32, as in `matmul`.
    """
    return _ragged(rows, kernels, sizes)


@jax.custom_vjp
def _ragged(rows: Any, kernels: Any, sizes: Any) -> Any:
    loop, whole = functools.partial(_forward_loop, dtype=rows.dtype), _whole
    out = jax.lax.platform_dependent(rows, kernels, sizes, cpu=loop, default=whole)
    return _within_groups(out, sizes)


def _forward(rows: Any, kernels: Any, sizes: Any) -> tuple[Any, tuple[Any, ...]]:
    return _ragged(rows, kernels, sizes), (rows, kernels, sizes)


def _backward(saved: tuple[Any, ...], out_grad: Any) -> tuple[Any, Any, None]:
    rows, kernels, sizes = saved
    # Rows beyond the groups may hold anything, and 0 times infinity is no number.
    rows, out_grad = (_within_groups(array, sizes) for array in (rows, out_grad))
    grads = jax.lax.platform_dependent(
        rows, kernels, sizes, out_grad, cpu=_backward_loop, default=_backward_whole
    )
    return _within_groups(grads[0], sizes), grads[1], None


_ragged.defvjp(_forward, _backward)


def _within_groups(rows: Any, sizes: Any) -> Any:
    is_inside = jnp.arange(rows.shape[0]) < sizes.sum()
    return jnp.where(is_inside[:, None], rows, jnp.zeros_like(rows))


def _whole(rows: Any, kernels: Any, sizes: Any) -> Any:
    narrow = min(rows.dtype, kernels.dtype, key=lambda dtype: dtype.itemsize)
    sides = rows.astype(narrow), kernels.astype(narrow)
    dot = functools.partial(jax.lax.ragged_dot, preferred_element_type=rows.dtype)
    if get_default_device().platform == "cpu" or not _has_tokamax():
        return dot(*sides, sizes)
    with conventions():
        tokamax = importlib.import_module("tokamax")
        return tokamax.ragged_dot(*sides, sizes, preferred_element_type=rows.dtype)


def _has_tokamax() -> bool:
    return can_import("tokamax", "experts use jax.lax.ragged_dot")


def _backward_whole(rows: Any, kernels: Any, sizes: Any, out_grad: Any) -> tuple[Any, Any]:
    pull = jax.vjp(functools.partial(_whole, sizes=sizes), rows, kernels)[1]
    if not _has_tokamax():
        return pull(out_grad)
    with conventions():
        return pull(out_grad)


class _Blocks:
    """Blocks of rows, one group after another. A block's first rows are all of its group."""

    def __init__(self, num_rows: int, sizes: Any) -> None:
        self.size = next((b for most, b in _BLOCKS if num_rows <= most), _LARGEST_BLOCK)
        self.sizes, self.ends = sizes, jnp.cumsum(sizes)
        self._block_ends = jnp.cumsum(-(-sizes // self.size))

    @property
    def number(self) -> Any:
        return self._block_ends[-1]

    def place(self, block: Any) -> tuple[Any, Any, Any]:
        """Return (group, first row, number of rows) of a block."""
        group = jnp.searchsorted(self._block_ends, block, side="right")
        blocks = -(-self.sizes[group] // self.size)
        offset = (block - self._block_ends[group] + blocks) * self.size
        first = self.ends[group] - self.sizes[group] + offset
        return group, first, jnp.minimum(self.size, self.ends[group] - first)

    def pad(self, rows: Any) -> Any:
        """Return the rows with so many more that every block ends within them."""
        return jnp.pad(rows, ((0, self.size), (0, 0)))

    def take(self, rows: Any, first: Any) -> Any:
        return jax.lax.dynamic_slice_in_dim(rows, first, self.size)


def _forward_loop(rows: Any, kernels: Any, sizes: Any, *, dtype: Any, axis: int = 0) -> Any:
    """Return the products over this axis of the kernels, block by block.

    A block may write after its group. The next block writes there again.
    """
    blocks = _Blocks(len(rows), sizes)
    padded = blocks.pad(rows)

    def write(block: Any, out: Any) -> Any:
        group, first, _ = blocks.place(block)
        kernel = jax.lax.dynamic_index_in_dim(kernels, group, keepdims=False)
        part = product(blocks.take(padded, first), kernel, (1, axis)).astype(dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, part, first, 0)

    out = jnp.zeros((len(padded), kernels.shape[2 - axis]), dtype)
    return jax.lax.fori_loop(0, blocks.number, write, out)[: len(rows)]


def _backward_loop(rows: Any, kernels: Any, sizes: Any, out_grad: Any) -> tuple[Any, Any]:
    """Return the gradients of the rows and of the kernels, whose sums are float32."""
    rows_grad = _forward_loop(out_grad, kernels, sizes, dtype=rows.dtype, axis=1)
    narrow = min(rows.dtype, kernels.dtype, key=lambda dtype: dtype.itemsize)
    blocks = _Blocks(len(rows), sizes)
    padded = blocks.pad(rows.astype(narrow)), blocks.pad(out_grad.astype(narrow))

    def add(block: Any, grads: Any) -> Any:
        group, first, number = blocks.place(block)
        left, right = (blocks.take(array, first) for array in padded)
        left = jnp.where(jnp.arange(blocks.size)[:, None] < number, left, jnp.zeros_like(left))
        old = jax.lax.dynamic_index_in_dim(grads, group, keepdims=False)
        new = old + product(left, right, (0, 0))
        return jax.lax.dynamic_update_index_in_dim(grads, new, group, 0)

    grads = jnp.zeros(kernels.shape, jnp.float32)
    grads = jax.lax.fori_loop(0, blocks.number, add, grads)
    return rows_grad, grads.astype(kernels.dtype)
