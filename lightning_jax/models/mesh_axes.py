"""Which logical axis of an array lies on which axes of the device mesh: one table for all."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

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


def partition(
    logical: Sequence[str | None], sizes: Sequence[Any], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """How axes of these names and sizes lie on a mesh. One that does not divide stays whole."""
    parts = []
    for axis, size in zip(logical, sizes, strict=True):
        names = MESH_AXES[axis]
        fits = names and size % math.prod(mesh.shape[name] for name in names) == 0
        parts.append(names if fits else None)
    return PartitionSpec(*parts)
