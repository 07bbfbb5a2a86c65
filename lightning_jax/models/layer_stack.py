"""Weights of all layers stacked by kind, so that a program has few arguments.

The host passes every array to every program. On a GPU that takes longer than the computation of a
small model's layer. A layer's weights are a static slice of the stack, which XLA reads in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

STACK = "layers"  # path of the stacked layers, each leaf [L, ...]
_PREFIX = "layers_"  # of the paths of single layers


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Return the weights with those of all layers stacked on a first axis."""
    number = sum(name.startswith(_PREFIX) for name in params)
    layers = [params[f"{_PREFIX}{i}"] for i in range(number)]
    others = {name: leaf for name, leaf in params.items() if not name.startswith(_PREFIX)}
    return others | {STACK: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def layer_of(params: dict[str, Any], layer: int) -> dict[str, Any]:
    """Return the weights of one layer, stacked or not."""
    if STACK in params:
        return jax.tree.map(lambda leaf: leaf[layer], params[STACK])
    return params[f"{_PREFIX}{layer}"]


def stacked_shardings(shardings: Any) -> Any:
    """Return the shardings of the stacked weights, from one for all or a tree of them."""
    if isinstance(shardings, Sharding):
        return shardings
    others = {name: one for name, one in shardings.items() if not name.startswith(_PREFIX)}
    return others | {STACK: jax.tree.map(stacked_sharding, shardings[f"{_PREFIX}0"])}


def stacked_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding of a stack of arrays with this one, which is not split by layer."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return sharding
