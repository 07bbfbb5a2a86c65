"""Where arrays lie on a mesh: one table from logical axes to mesh axes, and what follows from it."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lightning_jax.config import ConfigError, MeshConfig
from lightning_jax.models.transformer import DecoderConfig, init_params

# Logical axis -> mesh axes. An axis whose length its mesh axes do not divide stays whole.
TABLE: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}

# Parameter (its last two path parts) -> logical axes; None is not split.
_PARAMS: dict[str, tuple[str | None, ...]] = {
    "embed/embedding": ("vocab", "embed"),
    "head/kernel": ("embed", "vocab"),
    "q/kernel": ("embed", "heads"),
    "k/kernel": ("embed", "kv_heads"),
    "v/kernel": ("embed", "kv_heads"),
    "o/kernel": ("heads", "embed"),
    "gate/kernel": ("embed", "mlp"),
    "up/kernel": ("embed", "mlp"),
    "down/kernel": ("mlp", "embed"),
    "q/bias": ("heads",),
    "k/bias": ("kv_heads",),
    "v/bias": ("kv_heads",),
}


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh of the settings, over the first devices of all processes.

    One axis may be -1 and takes what the others leave. Raises ConfigError if the sizes do not fit.
    """
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    devices = jax.devices()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    num_free = sum(size == -1 for size in sizes.values())
    if num_free > 1 or fixed < 1 or fixed > len(devices) or (num_free and len(devices) % fixed):
        raise ConfigError(
            f"mesh is {sizes} on {len(devices)} devices; expected sizes of at least 1 whose product "
            "is at most that number, and at most one -1 to take what divides it."
        )
    shape = [len(devices) // fixed if size == -1 else size for size in sizes.values()]
    grid = np.asarray(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def param_shardings(config: DecoderConfig, mesh: Mesh) -> Any:
    """A sharding for each parameter, in the shape of the parameters."""
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = "/".join(part.key for part in path[-2:])
        axes = _PARAMS.get(name, (None,) * leaf.ndim)  # norms are whole everywhere
        return NamedSharding(mesh, _spec(axes, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, shapes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the data-parallel devices."""
    return NamedSharding(mesh, PartitionSpec(TABLE["rows"]))


def num_row_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split; `batch.rows` is a multiple of it."""
    return math.prod(mesh.shape[axis] for axis in TABLE["rows"])


def _spec(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    parts = []
    for axis, length in zip(axes, shape, strict=True):
        names = TABLE[axis] if axis else ()
        size = math.prod(mesh.shape[name] for name in names)
        parts.append(names if names and length % size == 0 else None)
    return PartitionSpec(*parts)
