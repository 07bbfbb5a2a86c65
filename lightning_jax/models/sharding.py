"""Which axis of an array lies on which axis of the device mesh: one table for the whole project."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lightning_jax.config import ConfigError, MeshConfig
from lightning_jax.models.names import Path, flatten, unflatten
from lightning_jax.models.transformer import DecoderConfig, Params, init_params

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. Rows of a batch are split by both kinds of data parallelism; "fsdp"
# also splits the weights, gathered layer by layer, and "tensor" splits the work of one layer.
MESH_AXES: dict[str | None, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    None: (),
}

# Parameter -> its logical axes, by the last two keys of its path.
_LOGICAL: dict[Path, tuple[str | None, ...]] = {
    ("embed", "embedding"): ("vocab", "embed"),
    ("head", "kernel"): ("embed", "vocab"),
    ("q", "kernel"): ("embed", "heads"),
    ("k", "kernel"): ("embed", "kv_heads"),
    ("v", "kernel"): ("embed", "kv_heads"),
    ("o", "kernel"): ("heads", "embed"),
    ("gate", "kernel"): ("embed", "mlp"),
    ("up", "kernel"): ("embed", "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
    ("q", "bias"): ("heads",),
    ("k", "bias"): ("kv_heads",),
    ("v", "bias"): ("kv_heads",),
}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The grid of devices, by default of all; where the sizes need fewer, of the first ones.

    Raises ConfigError where the sizes do not fit.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [getattr(config, axis) for axis in AXES]
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known > 0 and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if min(sizes) < 1 or math.prod(sizes) > len(devices):
        wanted = ", ".join(f"{axis}={getattr(config, axis)}" for axis in AXES)
        raise ConfigError(
            f"mesh {wanted} does not fit {len(devices)} devices; expected sizes whose product is "
            f"at most {len(devices)}, one of them may be -1. Change mesh.* in the config."
        )
    types = (AxisType.Auto,) * len(AXES)
    if math.prod(sizes) == len(jax.devices()) and devices == jax.devices():
        return jax.make_mesh(tuple(sizes), AXES, axis_types=types)
    return Mesh(np.array(devices[: math.prod(sizes)]).reshape(sizes), AXES, axis_types=types)


def param_shardings(config: DecoderConfig, mesh: Mesh) -> Params:
    """A tree like the parameters, of their places. An axis that does not divide stays whole."""
    shapes = flatten(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    units = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    places = {}
    for path, leaf in shapes.items():
        logical = _LOGICAL.get(path[-2:], (None,) * len(leaf.shape))
        # Heads are split between devices, never within one.
        pairs = zip(logical, leaf.shape, strict=True)
        sizes = [units.get(axis or "", size) for axis, size in pairs]
        places[path] = NamedSharding(mesh, _spec(logical, sizes, mesh))
    return unflatten(places)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The place of an array whose first axis is the batch's rows; they must divide evenly."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["rows"]))


def num_row_shards(mesh: Mesh) -> int:
    """Into how many parts a batch's rows are split; `batch.rows` is a multiple of it."""
    return math.prod(mesh.shape[axis] for axis in MESH_AXES["rows"])


def cache_sharding(config: DecoderConfig, mesh: Mesh) -> NamedSharding:
    """The place of one segment of keys or values [S, K, ...]: split by head, slots together."""
    return NamedSharding(
        mesh, _spec((None, "kv_heads", None, None), [1, config.num_kv_heads, 1, 1], mesh)
    )


def _spec(logical: tuple[str | None, ...], sizes: Sequence[Any], mesh: Mesh) -> PartitionSpec:
    parts = []
    for axis, size in zip(logical, sizes, strict=True):
        names = MESH_AXES[axis]
        fits = names and size % math.prod(mesh.shape[name] for name in names) == 0
        parts.append(names if fits else None)
    return PartitionSpec(*parts)
