"""Products of activations and kernels, written so that XLA on a CPU runs them fast.

A kernel is [in, out]. For decoding on a CPU it is transposed to `kernel_t` [out, in].
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Float32

FEW_ROWS = 32  # up to this many rows, a transposed kernel is on the left of its product


def matmul(
    x: Float[Array, "*rows I"], kernel: Float[Array, "_ _"], axis: int = 0
) -> Float[Array, "*rows O"]:
    """Return the product in `x`'s dtype, with our own gradient rule.

    `axis` is the kernel axis that is summed over: 0 for [I, O], 1 for [O, I]. A float32 `x` is
    rounded to bfloat16 for a bfloat16 kernel, and the sums are float32. This is the fastest way on
    a CPU.
    """
    return _matmul(x, kernel, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: Array, kernel: Array, axis: int) -> Array:
    return _product_as(x.dtype, x, kernel, (x.ndim - 1, axis))


def _forward(x: Array, kernel: Array, axis: int) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(x, kernel, axis), (x, kernel)


def _backward(axis: int, saved: tuple[Array, Array], out_grad: Array) -> tuple[Array, Array]:
    """Return the gradients of `x` and of the kernel.

    JAX's own rule for the kernel computes [out, in] and transposes it. XLA on a CPU then copies
    `out_grad` element by element, which takes a tenth of a training step.
    """
    x, kernel = saved
    sides = x.reshape(-1, x.shape[-1]), out_grad.reshape(-1, out_grad.shape[-1])
    side = keep_in_loop(kernel, out_grad)
    x_grad = _product_as(x.dtype, out_grad, side, (out_grad.ndim - 1, 1 - axis))
    left, right = sides[::-1] if axis else sides
    return x_grad, _product_as(kernel.dtype, left, right, (0, 0))


_matmul.defvjp(_forward, _backward)


def keep_in_loop(weights: Array, data: Array) -> Array:
    """Return the weights, tied to data that changes between the iterations of a loop.

    XLA moves a computation out of a loop if it is the same in all iterations. On a CPU it also
    copies weights for one operation, for example to transpose a kernel. So a loop over microbatches
    would begin with a copy of all weights.
    """

    def tied(weights: Array, data: Array) -> Array:
        return jax.lax.optimization_barrier((weights, data))[0]

    return jax.lax.platform_dependent(weights, data, cpu=tied, default=lambda weights, _: weights)


def _product_as(dtype: Any, left: Array, right: Array, axes: tuple[int, int]) -> Array:
    """Return the product over these axes in `dtype`.

    If either side or `dtype` is bfloat16, both sides are cast to bfloat16. A CPU sums in float32
    first. Its bfloat16 sums run one by one and take three to seven times as long.
    """
    narrow = _narrowest(left.dtype, right.dtype, jnp.dtype(dtype))
    if narrow == jnp.float32:
        return product(left, right, axes)

    def on_cpu(left: Array, right: Array) -> Array:
        # XLA cannot use its matmul library, which takes half as long, if it reads the left side
        # transposed. The new layout avoids that. With several devices it would send all rows to
        # each of them, so it is skipped.
        if axes[0] != 0 or jax.device_count() > 1:
            return product(left, right, axes).astype(dtype)
        turned = with_layout_constraint(left.T, Layout(major_to_minor=(0, 1)))
        return product(turned, right, (1, axes[1])).astype(dtype)

    sides = left.astype(narrow), right.astype(narrow)
    as_asked = functools.partial(_sums, axes=axes, dtype=dtype)
    return jax.lax.platform_dependent(*sides, cpu=on_cpu, default=as_asked)


def product(
    left: Array | np.ndarray, right: Array | np.ndarray, axes: tuple[int, int]
) -> Float32[Array, "..."]:
    """Return the float32 product over these axes. If a side is bfloat16, both are rounded to it."""
    narrow = _narrowest(left.dtype, right.dtype)
    left, right = left.astype(narrow), right.astype(narrow)
    is_vector = axes[0] != 0 and left.ndim > 1 and left.size == left.shape[axes[0]]
    if narrow == jnp.float32 or not is_vector:
        return _sums(left, right, axes)
    # On a CPU a bfloat16 product of one row takes ten times as long as one of two rows.
    return _sums(jnp.concatenate([left, left]), right, axes)[:1]


def _sums(left: Any, right: Any, axes: tuple[int, int], dtype: Any = jnp.float32) -> Any:
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=dtype)


def _narrowest(*dtypes: jnp.dtype) -> jnp.dtype:
    return min(dtypes, key=lambda dtype: dtype.itemsize)


def matmul_turned(
    x: Float[Array, "*rows I"], kernel: Float[Array, "O I"]
) -> Float32[Array, "*rows O"]:
    """Return the product with a transposed kernel, in float32, without a gradient.

    XLA packs the right side of a product on every run, so with few rows the kernel is better on
    the left.
    """
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > FEW_ROWS:
        out = _sums(rows, kernel, (1, 1))
    else:  # without the barrier, XLA would swap the sides back to avoid transposing the result
        out = jax.lax.optimization_barrier(_sums(kernel, rows, (1, 1))).T
    return out.reshape(*x.shape[:-1], len(kernel))


@jax.jit
def turn_kernels(params: dict[str, Any]) -> dict[str, Any]:
    """Replace each `kernel` of a tree of weights by its transpose, `kernel_t`.

    Those of experts, [N, in, out], stay.
    """
    turned = {}
    for name, leaf in params.items():
        if name == "kernel" and leaf.ndim == 2:
            turned["kernel_t"] = leaf.T
        else:
            turned[name] = turn_kernels(leaf) if isinstance(leaf, dict) else leaf
    return turned
