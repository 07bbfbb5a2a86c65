"""Shardings of parameters, batches and caches on the device mesh, by the table in mesh.py.

In a multi-process run all processes must call `put_on_mesh` and `to_host` in the same order.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lightning_jax.models.blocks.layer import axes_of, units_of
from lightning_jax.models.blocks.parts import Axes
from lightning_jax.models.formats.param_names import ParamPath, flatten, unflatten
from lightning_jax.models.mesh import MESH_AXES, partition
from lightning_jax.models.shape import DecoderConfig, DecoderShape
from lightning_jax.models.transformer import LAYER, STACK, Gather, Params, param_shapes

# Logical axes of the parameters outside the layers. Those of a layer are in blocks/.
_OUTSIDE: dict[ParamPath, Axes] = {
    ("embed", "embedding"): ("vocab", "embed"),
    ("head", "kernel"): ("embed", "vocab"),
}


def param_shardings(config: DecoderConfig, mesh: Mesh) -> Params:
    """Return a tree of the parameters' shardings. An axis that does not divide stays whole."""
    shardings = {}
    for path, leaf in flatten(param_shapes(config)).items():
        logical, units = _OUTSIDE.get(path, ()), {}
        if path[0].startswith(LAYER):
            block = config.shape.blocks[int(path[0].removeprefix(LAYER))]
            logical, units = axes_of(block).get(path[1:], ()), units_of(block)
        logical = (None,) * (len(leaf.shape) - len(logical)) + logical  # stacked adapters
        # Whole heads are split between devices. A head itself is never split.
        pairs = zip(logical, leaf.shape, strict=True)
        sizes = [units.get(axis or "", size) for axis, size in pairs]
        shardings[path] = NamedSharding(mesh, partition(logical, sizes, mesh))
    return unflatten(shardings)


def stacked_shardings(shardings: Any) -> Any:
    """Return the shardings of weights whose layers are stacked, from one for all or a tree."""
    if isinstance(shardings, Sharding):
        return shardings
    others = {name: one for name, one in shardings.items() if not name.startswith(LAYER)}
    return others | {STACK: jax.tree.map(_stacked, shardings[f"{LAYER}0"])}


def _stacked(sharding: Sharding) -> Sharding:
    """Return the sharding of a stack of arrays with this one, which is not split by layer."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return sharding


def make_gather(config: DecoderConfig, mesh: Mesh) -> Gather:
    """Return a function that gathers weights for use and scatters their gradients back.

    It all-gathers over the "fsdp" axis and leaves "tensor" splits alone. Gradients are
    reduce-scattered to where the weights are. Without this, the compiler would move activations,
    which are larger.
    """
    shardings = flatten(param_shardings(config, mesh))

    def gather(params: Params, layer: int | None = None) -> Params:
        above = () if layer is None else (f"{LAYER}{layer}",)
        leaves = flatten(params).items()
        return unflatten(
            {path: _gather_leaf(leaf, shardings[*above, *path]) for path, leaf in leaves}
        )

    return gather


def _gather_leaf(leaf: Any, split: NamedSharding) -> Any:
    gathered = (*MESH_AXES["embed"], MESH_AXES["embed"])  # a spec holds a name or a tuple of names
    parts = [None if part in gathered else part for part in split.spec]
    whole = NamedSharding(split.mesh, PartitionSpec(*parts))

    @jax.custom_vjp
    def bring(leaf: Any) -> Any:
        # In two steps, or the compiler would gather float32 and cast afterwards.
        leaf = jax.lax.with_sharding_constraint(leaf, split)
        return jax.lax.with_sharding_constraint(leaf, whole)

    def put_back(_: None, grad: Any) -> tuple[Any]:
        # In two steps, or the compiler would move activations to where the gradient goes.
        grad = jax.lax.with_sharding_constraint(grad, whole)
        return (jax.lax.with_sharding_constraint(grad, split),)

    bring.defvjp(lambda leaf: (bring(leaf), None), put_back)
    return bring(leaf)


def cache_sharding(shape: DecoderShape, mesh: Mesh) -> NamedSharding:
    """Return the sharding of one segment of keys or values [S, K, ...], split by head only."""
    heads = math.gcd(*(block.mixer.kv_heads for block in shape.blocks))
    return NamedSharding(mesh, partition((None, "kv_heads", None, None), [1, heads, 1, 1], mesh))


def put_on_mesh(tree: Any, shardings: Any, *, donate: bool = False) -> Any:
    """Put arrays on the mesh at their shardings.

    In a multi-process run the arrays are equal in all processes or span them. Each process copies
    its part of a local array to its own devices, and nothing else is transferred. `shardings` is
    one sharding or a tree of them. With `donate` the input arrays are consumed.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings, donate=donate)
    leaves, form = jax.tree.flatten(tree)
    return form.unflatten(map(_put_here, leaves, list_shardings(shardings, tree)))


def list_shardings(shardings: Any, tree: Any) -> list[Any]:
    """Return the sharding of each leaf, from one sharding or a tree of them."""
    if isinstance(shardings, Sharding):
        return [shardings] * len(jax.tree.leaves(tree))
    return jax.tree.leaves(shardings)


def _put_here(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    here = np.asarray(leaf)
    return jax.make_array_from_callback(here.shape, sharding, lambda index: here[index])


def to_host(tree: Any) -> Any:
    """Return the full arrays on the host, in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
