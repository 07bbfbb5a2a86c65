"""Products of activations and kernels, written as XLA's CPU compiler makes them fast.

A kernel is [in, out]. Where a CPU decodes, it is turned: `kernel_t` [out, in].
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Float32

FEW_ROWS = 32  # up to so many, a turned kernel is on the left of its product


def matmul(
    x: Float[Array, "*rows I"], kernel: Float[Array, "_ _"], axis: int = 0
) -> Float[Array, "*rows O"]:
    """The product, of `x`'s dtype, with a rule for its gradient of our own. `axis` is that of the
    kernel that is summed over: 0 where it is [I, O], 1 where it is [O, I].

    A float32 `x` beside a bfloat16 kernel is rounded to bfloat16, and the sums are float32: for a
    CPU the fastest there is.
    """
    return _matmul(x, kernel, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: Any, kernel: Any, axis: int) -> Any:
    return _product_as(x.dtype, x, kernel, (x.ndim - 1, axis))


def _forward(x: Any, kernel: Any, axis: int) -> tuple[Any, Any]:
    return _matmul(x, kernel, axis), (x, kernel)


def _backward(axis: int, saved: Any, out_grad: Any) -> tuple[Any, Any]:
    """JAX's own rule for the kernel makes [out, in] and turns it, for which XLA on a CPU copies
    `out_grad` element by element: a tenth of a training step."""
    x, kernel = saved
    sides = x.reshape(-1, x.shape[-1]), out_grad.reshape(-1, out_grad.shape[-1])
    x_grad = _product_as(x.dtype, out_grad, kernel, (out_grad.ndim - 1, 1 - axis))
    left, right = sides[::-1] if axis else sides
    return x_grad, _product_as(kernel.dtype, left, right, (0, 0))


_matmul.defvjp(_forward, _backward)


def _product_as(dtype: Any, left: Any, right: Any, axes: tuple[int, int]) -> Any:
    """The sums over these axes, in `dtype`; where one of the three is bfloat16, both sides are.

    A CPU makes float32 sums of bfloat16 first: sums of bfloat16, which it makes one by one, take
    it three to seven times as long.
    """
    narrow = _narrowest(left.dtype, right.dtype, jnp.dtype(dtype))
    if narrow == jnp.float32:
        return product(left, right, axes)

    def on_cpu(left: Any, right: Any) -> Any:
        # A left side that XLA reads turned keeps it from its library for products, which takes half
        # as long, so it is laid out anew; not on several devices, which would all be sent all rows.
        if axes[0] != 0 or jax.device_count() > 1:
            return product(left, right, axes).astype(dtype)
        turned = with_layout_constraint(left.T, Layout(major_to_minor=(0, 1)))
        return product(turned, right, (1, axes[1])).astype(dtype)

    sides = left.astype(narrow), right.astype(narrow)
    as_asked = functools.partial(_sums, axes=axes, dtype=dtype)
    return jax.lax.platform_dependent(*sides, cpu=on_cpu, default=as_asked)


def product(left: Any, right: Any, axes: tuple[int, int]) -> Float32[Array, "..."]:
    """The float32 sums over these axes of both; where one is bfloat16, both are rounded to it."""
    narrow = _narrowest(left.dtype, right.dtype)
    left, right = left.astype(narrow), right.astype(narrow)
    is_vector = axes[0] != 0 and left.ndim > 1 and left.size == left.shape[axes[0]]
    if narrow == jnp.float32 or not is_vector:
        return _sums(left, right, axes)
    # On a CPU a product of one row of bfloat16 takes ten times as long as one of two.
    return _sums(jnp.concatenate([left, left]), right, axes)[:1]


def _sums(left: Any, right: Any, axes: tuple[int, int], dtype: Any = jnp.float32) -> Any:
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=dtype)


def _narrowest(*dtypes: jnp.dtype) -> jnp.dtype:
    return min(dtypes, key=lambda dtype: dtype.itemsize)


def matmul_turned(
    x: Float[Array, "*rows I"], kernel: Float[Array, "O I"]
) -> Float32[Array, "*rows O"]:
    """The product with a turned kernel, in float32. Has no gradient.

    XLA packs the right side of a product anew each time it runs, so with few rows the kernel is
    better on the left.
    """
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > FEW_ROWS:
        out = _sums(rows, kernel, (1, 1))
    else:  # behind a barrier, else the compiler swaps the sides back and saves turning the result
        out = jax.lax.optimization_barrier(_sums(kernel, rows, (1, 1))).T
    return out.reshape(*x.shape[:-1], len(kernel))


@jax.jit
def turn_kernels(params: dict[str, Any]) -> dict[str, Any]:
    """The weights of a model, or some of them, with each `kernel` as `kernel_t`."""
    turned = {}
    for name, leaf in params.items():
        if name == "kernel":
            turned["kernel_t"] = leaf.T
        else:
            turned[name] = turn_kernels(leaf) if isinstance(leaf, dict) else leaf
    return turned
