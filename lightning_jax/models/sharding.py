"""Shardings of parameters, batches and caches on the device mesh, by the table in mesh_axes.py.

In a multi-process run all processes must call `put_on_mesh` and `to_host` in the same order.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lightning_jax.models.config import MeshConfig
from lightning_jax.models.formats.param_names import Path, flatten, unflatten
from lightning_jax.models.mesh_axes import AXES, MESH_AXES, partition
from lightning_jax.models.transformer import DecoderConfig, Gather, Params, param_shapes
from lightning_jax.settings import ConfigError

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
# An adapter is sharded like its kernel. Its rank axis is never split.
_LOGICAL |= {
    (name, leaf): (axes[0], None) if leaf == "lora_a" else (None, axes[1])
    for (name, kind), axes in _LOGICAL.items()
    if kind == "kernel"
    for leaf in ("lora_a", "lora_b")
}


def make_mesh(
    config: MeshConfig, devices: Sequence[Any] | None = None, *, section: str = "mesh"
) -> Mesh:
    """Build the device mesh, by default from all devices.

    If the sizes need fewer, take the first ones from `config.first_device` on. Raises ConfigError,
    which names the config's `section`, if the sizes do not fit.
    """
    devices = list(jax.devices() if devices is None else devices)[config.first_device :]
    sizes = [getattr(config, axis) for axis in AXES]
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known > 0 and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if min(sizes) < 1 or math.prod(sizes) > len(devices):
        wanted = ", ".join(f"{axis}={getattr(config, axis)}" for axis in AXES)
        raise ConfigError(
            f"{section} {wanted} does not fit {len(devices)} devices; change {section}.* in the "
            f"config so that the product of the sizes is at most {len(devices)} (one size may be "
            f"-1){f', or change {section}.first_device' if config.first_device else ''}",
            reason="mismatch",
            key=section,
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
    default each replica takes `tensor` of the trainer's devices. On a CPU, whose devices are
    simulated, the trainer's mesh is used unchanged. In a multi-process run only process 0 serves,
    and by default each of its devices computes a share of every layer. Raises ConfigError if the
    mesh would not use all devices of process 0.
    """
    if jax.process_count() == 1:
        if serve is not None:
            return make_mesh(serve, devices, section="serve.mesh")
        mesh = make_mesh(trainer, devices)
        if mesh.devices.flat[0].platform == "cpu":
            return mesh
        copies = mesh.devices.reshape(-1, 1, mesh.shape["tensor"])
        return Mesh(copies, mesh.axis_names, axis_types=mesh.axis_types)
    local_devices = [device for device in jax.devices() if device.process_index == 0]
    mesh = make_mesh(serve or MeshConfig(fsdp=1, tensor=-1), local_devices, section="serve.mesh")
    if mesh.size != len(local_devices):
        raise ConfigError(
            f"serve.mesh uses {mesh.size} devices; with several processes it must use all "
            f"{len(local_devices)} of process 0. Change serve.mesh.* in the config.",
            reason="mismatch",
            key="serve.mesh",
        )
    return mesh


def param_shardings(config: DecoderConfig, mesh: Mesh) -> Params:
    """Return a tree of the parameters' shardings. An axis that does not divide stays whole."""
    shapes = flatten(param_shapes(config))
    units = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    shardings = {}
    for path, leaf in shapes.items():
        logical = _LOGICAL.get(path[-2:], ())
        logical = (None,) * (len(leaf.shape) - len(logical)) + logical  # stacked adapters
        # Whole heads are split between devices. A head itself is never split.
        pairs = zip(logical, leaf.shape, strict=True)
        sizes = [units.get(axis or "", size) for axis, size in pairs]
        shardings[path] = NamedSharding(mesh, partition(logical, sizes, mesh))
    return unflatten(shardings)


def make_gather(config: DecoderConfig, mesh: Mesh) -> Gather:
    """Return a function that gathers weights for use and scatters their gradients back.

    It all-gathers over the "fsdp" axis and leaves "tensor" splits alone. Gradients are
    reduce-scattered to where the weights are. Without this, the compiler would move activations,
    which are larger.
    """
    specs = {
        path[-2:]: sharding.spec
        for path, sharding in flatten(param_shardings(config, mesh)).items()
    }

    def gather(params: Params) -> Params:
        return unflatten(
            {
                path: _gather_leaf(leaf, NamedSharding(mesh, specs[path[-2:]]))
                for path, leaf in flatten(params).items()
            }
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


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array with batch rows as first axis. They must divide evenly."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["rows"]))


def num_row_shards(mesh: Mesh) -> int:
    """Return the number of shards of a batch's rows. `batch.rows` is a multiple of this."""
    return math.prod(mesh.shape[axis] for axis in MESH_AXES["rows"])


def cache_sharding(config: DecoderConfig, mesh: Mesh) -> NamedSharding:
    """Return the sharding of one segment of keys or values [S, K, ...], split by head only."""
    return NamedSharding(
        mesh, partition((None, "kv_heads", None, None), [1, config.num_kv_heads, 1, 1], mesh)
    )


def platform_of(sharding: jax.sharding.Sharding) -> str:
    """Return JAX's name for the platform of a sharding's devices: cpu, gpu or tpu."""
    return next(iter(sharding.device_set)).platform


def put_on_mesh(tree: Any, shardings: Any, *, donate: bool = False) -> Any:
    """Put arrays on the mesh at their shardings.

    In a multi-process run the arrays are equal in all processes or span them. Each process copies
    its part of a local array to its own devices, and nothing else is transferred. `shardings` is
    one sharding or a tree of them. With `donate` the input arrays are consumed.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings, donate=donate)
    leaves, form = jax.tree.flatten(tree)
    if isinstance(shardings, NamedSharding):
        targets = [shardings] * len(leaves)
    else:
        targets = jax.tree.leaves(shardings)
    return form.unflatten(map(_put_here, leaves, targets))


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
