"""MLP of experts: a router chooses some dense MLPs for each token and weighs their results.

The router is computed in float32. No token is dropped, and the results of a token's experts are
added in the order of their weights, so they do not depend on other tokens.

Parameters: router/kernel [E, N]   experts_gate, experts_up /kernel [N, E, M]
experts_down/kernel [N, M, E]
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float32, Int32

from lightning_jax.models.blocks.parts import Axes, Hidden, Parts, Width
from lightning_jax.models.blocks.ragged import ragged_matmul
from lightning_jax.models.mesh import partition
from lightning_jax.models.shape import Experts

ROUTER = "router"
KERNELS = (ROUTER, "experts_gate", "experts_up", "experts_down")
ADAPTED: tuple[str, ...] = ()
AXES: dict[tuple[str, str], Axes] = {
    ("experts_gate", "kernel"): ("expert", "embed", "mlp"),
    ("experts_up", "kernel"): ("expert", "embed", "mlp"),
    ("experts_down", "kernel"): ("expert", "mlp", "embed"),
}
ROUTES = "routes"  # collection in which a router leaves its choice, if it is mutable
_Weights = Float32[Array, "B T k"]
_Ids = Int32[Array, "B T k"]


class Router(nn.Module):
    """Choice of experts for each token, in float32."""

    spec: Experts
    turned: bool
    trains: bool

    @nn.compact
    def __call__(self, x: Hidden) -> tuple[_Weights, _Ids]:
        number, init = self.spec.number, nn.initializers.normal(0.02)
        if self.turned:
            kernel = jnp.asarray(self.param("kernel_t", init, (number, x.shape[-1]))).T
        else:
            kernel = jnp.asarray(self.param("kernel", init, (x.shape[-1], number)))
        kernel = kernel if self.trains else jax.lax.stop_gradient(kernel)
        sides = x.astype(jnp.float32), kernel.astype(jnp.float32)
        logits = jnp.einsum("bte,en->btn", *sides, precision=jax.lax.Precision.HIGHEST)
        shares = jax.nn.softmax(logits, axis=-1)
        weights, ids = jax.lax.top_k(shares, self.spec.chosen)
        self.sow(ROUTES, "ids", ids)
        self.sow(ROUTES, "entropy", -(shares * jax.nn.log_softmax(logits)).sum(axis=-1))
        if self.spec.renormalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights, ids


def apply(spec: Experts, parts: Parts, x: Hidden) -> Hidden:
    """Return the weighted sum of each token's experts."""
    execution, width = parts.execution, x.shape[-1]
    router = Router(spec, execution.turned, execution.trains_router, name=ROUTER)
    weights, ids = router(x)
    inward, outward = (spec.number, width, spec.size), (spec.number, spec.size, width)
    shapes = {"experts_gate": inward, "experts_up": inward, "experts_down": outward}
    kernels = [parts.stack(name, *shape) for name, shape in shapes.items()]
    return _on_mesh(x, weights, ids, *kernels).astype(x.dtype)


def _on_mesh(x: Hidden, weights: _Weights, ids: _Ids, *kernels: Any) -> Float32[Array, "B T E"]:
    """Return `_mix` of all experts, each device computing its share of them.

    Devices that share the experts exchange their tokens, and add their results. If their number
    does not divide the rows, each has all tokens already.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or mesh.size == 1:
        return _mix(x, weights, ids, *kernels)
    number, _, size = kernels[0].shape
    split = partition(("rows", "expert", "mlp"), (x.shape[0], number, size), mesh)
    rows, experts, features = ((name,) if isinstance(name, str) else name or () for name in split)

    def on_device(*arrays: Any) -> Any:
        x, weights, ids, *kernels = arrays
        share = len(kernels[0])
        if rows and experts:
            gather = functools.partial(jax.lax.all_gather, axis_name=experts, tiled=True)
            x, weights, ids = gather(x), gather(weights), gather(ids)
        first = jax.lax.axis_index(experts) * share if experts else 0
        out = _mix(x, weights, ids - first, *kernels)
        if rows and experts:
            out = jax.lax.psum_scatter(out, experts, tiled=True)
        added = features if rows else (*experts, *features)
        return jax.lax.psum(out, added) if added else out

    by_row, inward = jax.P(rows, None, None), jax.P(experts, None, features)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(by_row, by_row, by_row, inward, inward, jax.P(experts, features, None)),
        out_specs=by_row,
        check_vma=False,
    )(x, weights, ids, *kernels)


def _mix(x: Hidden, weights: _Weights, ids: _Ids, *kernels: Any) -> Float32[Array, "B T E"]:
    """Return the tokens' weighted sums over the experts whose kernels these are.

    Experts of other ids add nothing.
    """
    gate, up, down = kernels
    number, width = len(gate), x.shape[-1]
    flat = jnp.where((ids >= 0) & (ids < number), ids, number).reshape(-1)
    order = jnp.argsort(flat, stable=True)  # of pairs of a token and an expert, by expert
    places = jnp.argsort(order)
    sizes = jnp.bincount(flat, length=number).astype(jnp.int32)
    rows = _take(x.reshape(-1, width), order, places)
    gates = checkpoint_name(ragged_matmul(rows, gate, sizes), "gate")
    ups = checkpoint_name(ragged_matmul(rows, up, sizes), "up")
    out = ragged_matmul(nn.silu(gates) * ups, down, sizes)
    by_token = _take(out, places, order).reshape(*ids.shape, width).astype(jnp.float32)
    return (by_token * weights[..., None]).sum(axis=-2)


@jax.custom_vjp
def _take(rows: Any, index: Any, places: Any) -> Any:
    """Repeat each row len(index) / len(rows) times, and return the repeated rows at `index`.

    `places` is the inverse permutation, by which the gradient is taken. JAX's own rule scatters.
    """
    return rows[index // (len(index) // len(rows))]


def _take_forward(rows: Any, index: Any, places: Any) -> tuple[Any, tuple[Any, int]]:
    return _take(rows, index, places), (places, len(rows))


def _take_backward(saved: tuple[Any, int], grad: Any) -> tuple[Any, None, None]:
    places, number = saved
    by_row = grad[places].reshape(number, -1, grad.shape[-1])
    return by_row.astype(jnp.float32).sum(axis=1).astype(grad.dtype), None, None


_take.defvjp(_take_forward, _take_backward)


def units(spec: Experts) -> dict[str, int]:
    """Return the number of units of each logical axis that are never split."""
    return {"mlp": spec.size, "expert": spec.number}


def activations(spec: Experts, embed_dim: int) -> dict[str, Width]:
    """Return what a layer keeps of one token for its backward pass, by its name in `KEPT`."""
    names = {"gate": "mlp", "up": "mlp", "gated": "mlp", "sorted in": None, "sorted out": None}
    # Any device may get all pairs of the tokens that it shares experts with.
    inner = Width("mlp", spec.size, spec.chosen, gathers="expert")
    outer = Width(None, spec.chosen, embed_dim, gathers="expert")
    return {name: inner if axis else outer for name, axis in names.items()}


def shares(spec: Experts) -> dict[str, float]:
    """Return the share of a kernel's weights with which a token is multiplied, if not all."""
    return dict.fromkeys(KERNELS[1:], spec.chosen / spec.number)
