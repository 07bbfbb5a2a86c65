"""Table that maps logical axes of arrays to axes of the device mesh."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. Both kinds of data parallelism split the rows of a batch. "fsdp" also
# splits the weights, which are gathered layer by layer. "tensor" splits the work of one layer.
MESH_AXES: dict[str | None, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    None: (),
}


def partition(
    logical: Sequence[str | None], sizes: Sequence[Any], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Return the spec for axes of these names and sizes. Axes that do not divide stay whole."""
    parts = []
    for axis, size in zip(logical, sizes, strict=True):
        names = MESH_AXES[axis]
        fits = names and size % math.prod(mesh.shape[name] for name in names) == 0
        parts.append(names if fits else None)
    return PartitionSpec(*parts)
