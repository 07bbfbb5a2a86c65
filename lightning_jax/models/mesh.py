"""Device meshes, and the table that maps logical axes of arrays to their axes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lightning_jax.models.config import MeshConfig
from lightning_jax.settings import ConfigError

AXES = ("data", "fsdp", "expert", "tensor")

# Logical axis -> mesh axes. All but "tensor" split the rows of a batch. "fsdp" also splits the
# weights, which are gathered layer by layer. "expert" also splits experts, to which the tokens go.
# "tensor" splits the work of one layer.
MESH_AXES: dict[str | None, tuple[str, ...]] = {
    "rows": ("data", "fsdp", "expert"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "expert": ("expert",),
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


def make_mesh(
    config: MeshConfig, devices: Sequence[Any] | None = None, *, section: str = "mesh"
) -> Mesh:
    """Build the device mesh, by default from all devices.

    If the sizes need fewer, take the first ones from `config.first_device` on. Raises ConfigError,
    which names the config's `section`, if the sizes do not fit.
    """
    devices = list(jax.devices() if devices is None else devices)[config.first_device :]
    sizes = [getattr(config, axis) for axis in AXES]
    product = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and product > 0 and len(devices) % product == 0:
        sizes[sizes.index(-1)] = len(devices) // product
    if min(sizes) < 1 or math.prod(sizes) > len(devices):
        named = ", ".join(f"{axis}={getattr(config, axis)}" for axis in AXES)
        raise ConfigError.mismatch(
            section,
            f"{section} {named} does not fit {len(devices)} devices; change {section}.* in the "
            f"config so that the product of the sizes is at most {len(devices)} (one size may be "
            f"-1){f', or change {section}.first_device' if config.first_device else ''}",
        )
    types = (AxisType.Auto,) * len(AXES)
    if math.prod(sizes) == len(jax.devices()) and devices == jax.devices():
        return jax.make_mesh(tuple(sizes), AXES, axis_types=types)
    return Mesh(np.array(devices[: math.prod(sizes)]).reshape(sizes), AXES, axis_types=types)


def serving_mesh(
    serve: MeshConfig | None, trainer: MeshConfig, devices: Sequence[Any] | None = None
) -> Mesh:
    """Build the mesh of the serving devices, from `serve.mesh` or by default the trainer's mesh.

    `devices` are the candidates, by default all. The `data` axis counts replicas of the engine. By
    default each replica takes `expert` x `tensor` of the trainer's devices. On a CPU, whose devices
    are simulated, the trainer's mesh is used unchanged. In a multi-process run only process 0
    serves, and by default each of its devices computes a share of every layer. Raises ConfigError
    if the mesh would not use all devices of process 0.
    """
    if jax.process_count() == 1:
        if serve is not None:
            return make_mesh(serve, devices, section="serve.mesh")
        mesh = make_mesh(trainer, devices)
        if mesh.devices.flat[0].platform == "cpu":
            return mesh
        copies = mesh.devices.reshape(-1, 1, mesh.shape["expert"], mesh.shape["tensor"])
        return Mesh(copies, mesh.axis_names, axis_types=mesh.axis_types)
    local_devices = [device for device in jax.devices() if device.process_index == 0]
    mesh = make_mesh(serve or MeshConfig(fsdp=1, tensor=-1), local_devices, section="serve.mesh")
    if mesh.size != len(local_devices):
        raise ConfigError.mismatch(
            "serve.mesh",
            f"serve.mesh uses {mesh.size} devices; with several processes it must use all "
            f"{len(local_devices)} of process 0. Change serve.mesh.* in the config.",
        )
    return mesh


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array with batch rows as first axis. They must divide evenly."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["rows"]))


def num_row_shards(mesh: Mesh) -> int:
    """Return the number of shards of a batch's rows. `batch.rows` is a multiple of this."""
    return math.prod(mesh.shape[axis] for axis in MESH_AXES["rows"])


def platform_of(sharding: jax.sharding.Sharding) -> str:
    """Return JAX's name for the platform of a sharding's devices: cpu, gpu or tpu."""
    return next(iter(sharding.device_set)).platform
