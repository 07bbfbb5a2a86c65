"""Products of activations and kernels, written as XLA's CPU compiler makes them fast.

A kernel is [in, out]. Where a CPU decodes, it is turned: `kernel_t` [out, in].
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

FEW_ROWS = 32  # up to so many, a turned kernel is on the left of its product


@jax.custom_vjp
def matmul(x: Float[Array, "*rows I"], kernel: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """The product, with a rule for its gradient of our own."""
    return x @ kernel


def _backward(saved: Any, out_grad: Any) -> tuple[Any, Any]:
    """JAX's own rule for the kernel makes [out, in] and turns it, for which XLA on a CPU copies
    `out_grad` element by element: a tenth of a training step."""
    x, kernel = saved
    rows = x.reshape(-1, x.shape[-1]), out_grad.reshape(-1, out_grad.shape[-1])
    kernel_grad = jax.lax.dot_general(*rows, (((0,), (0,)), ((), ())))
    return out_grad @ kernel.T, kernel_grad


matmul.defvjp(lambda x, kernel: (matmul(x, kernel), (x, kernel)), _backward)


def matmul_turned(
    x: Float[Array, "*rows I"], kernel: Float[Array, "O I"]
) -> Float32[Array, "*rows O"]:
    """The product with a turned kernel, in float32. Has no gradient.

    XLA packs the right side of a product anew each time it runs, so with few rows the kernel is
    better on the left.
    """
    rows = x.reshape(-1, x.shape[-1])
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    if len(rows) > FEW_ROWS:
        out = dot(rows, kernel)
    else:  # behind a barrier, else the compiler swaps the sides back and saves turning the result
        out = jax.lax.optimization_barrier(dot(kernel, rows)).T
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
