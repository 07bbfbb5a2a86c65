"""Device-to-device copies of weights, which bring new weights to an engine.

A copy has two halves. `prepare_copy` casts the weights on their own devices, in one program, and
lays them out in the parts that engines need. `take_copy` gives an engine its parts. Identical
engines take from the same copy, so the weights are gathered once for any number of engines.

Weights on the host go through Ray's object store. It keeps the bytes of an array that pickle takes
out of band, and gives them to all processes of a machine without a copy. NumPy does this for its
own dtypes only, so bfloat16 travels as uint16.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from lightning_jax.models.formats.param_names import ParamPath, flatten, unflatten
from lightning_jax.models.sharding import list_shardings, stacked_shardings, to_host
from lightning_jax.models.transformer import Params, stack_layers
from lightning_jax.settings import ConfigError

HostWeights = dict[ParamPath, tuple[str, np.ndarray]]  # name of the dtype, and the array
_Bounds = tuple[tuple[int, int], ...]  # start and end index along each axis

_cast = jax.jit(lambda leaf, dtype: leaf.astype(dtype), static_argnums=1)


@dataclass(frozen=True)
class ServingCopy:
    """Weights in the serving dtype, on the devices they came from.

    Engines share these arrays if they can. They are never donated.
    """

    params: Params


def reshard(params: Params, shardings: Any, dtype: Any, *, stacked: bool = False) -> Any:
    """Copy the weights in `dtype` to other shardings, and return once the copy is complete.

    `shardings` is one sharding or a tree of them, for the stacked weights if `stacked`. If `params`
    span several processes, every process first gets a full copy on its own devices. Only the copy
    at `shardings` is kept. Processes that do not own those devices get None. Weights of one
    process, such as those just loaded, are copied without the others.
    """
    leaves = jax.tree.leaves(params)
    if all(not isinstance(leaf, jax.Array) or leaf.is_fully_addressable for leaf in leaves):
        return take_copy(prepare_copy(params, shardings, dtype, stacked=stacked), shardings)
    targets = jax.tree.leaves(shardings)
    everywhere = _in_every_process(targets[0].mesh)
    leaves, form = jax.tree.flatten(_copy(params, dtype, stacked))
    moved = jax.block_until_ready(
        jax.device_put(leaves, [NamedSharding(everywhere, target.spec) for target in targets])
    )
    if not targets[0].is_fully_addressable:
        return None
    parts = ([shard.data for shard in array.addressable_shards] for array in moved)
    return form.unflatten(
        jax.make_array_from_single_device_arrays(array.shape, target, shards)
        for array, target, shards in zip(moved, targets, parts, strict=True)
    )


def prepare_copy(
    params: Params,
    shardings: Any,
    dtype: Any,
    *,
    shared: Collection[ParamPath] = (),
    stacked: bool = False,
) -> ServingCopy:
    """Cast the weights of one process, and lay them out for engines with these `shardings`.

    Arrays at the `shared` paths are not copied if they already have this layout and `dtype`. The
    caller must not donate them. If `stacked`, `params` are a whole model, nothing is shared, and
    the copy has the weights of all layers stacked.
    """
    if stacked:
        return _stacked_copy(params, shardings, dtype)
    paths = list(flatten(params))
    leaves: list[Any] = [jnp.asarray(leaf) for leaf in flatten(params).values()]
    layouts = [
        layout(leaf.sharding, target)
        for leaf, target in zip(leaves, list_shardings(shardings, params), strict=True)
    ]
    to_cast = [
        i
        for i, (path, leaf, layout_here) in enumerate(zip(paths, leaves, layouts, strict=True))
        if path not in shared
        or leaf.dtype != jnp.dtype(dtype)
        or not leaf.sharding.is_equivalent_to(layout_here, leaf.ndim)
    ]
    cast = _caster(jnp.dtype(dtype), tuple((leaves[i].sharding, layouts[i]) for i in to_cast))
    for i, copied in zip(to_cast, cast([leaves[i] for i in to_cast]), strict=True):
        leaves[i] = copied
    return ServingCopy(unflatten(dict(zip(paths, leaves, strict=True))))


def _stacked_copy(params: Params, shardings: Any, dtype: Any) -> ServingCopy:
    leaves, form = jax.tree.flatten(jax.tree.map(jnp.asarray, params))
    sources = [leaf.sharding for leaf in leaves]
    stacked = stacked_shardings(form.unflatten(sources))
    ours, stacked_form = jax.tree.flatten(stacked)
    targets = list_shardings(shardings, stacked)
    layouts = tuple(layout(source, target) for source, target in zip(ours, targets, strict=True))
    program = _stacker(jnp.dtype(dtype), form, tuple(sources), stacked_form, layouts)
    return ServingCopy(program(leaves))


def take_copy(copy: ServingCopy, shardings: Any) -> Params:
    """Copy the prepared weights to these shardings of the same process, and wait for the copy.

    A part that is already on its device is not copied.
    """
    leaves, form = jax.tree.flatten(copy.params)
    targets = list_shardings(shardings, copy.params)
    parts, destinations = [], []
    for leaf, target in zip(leaves, targets, strict=True):
        shards = {
            (shard.device, _bounds(shard.index, leaf)): shard for shard in leaf.addressable_shards
        }
        for device, index in target.addressable_devices_indices_map(leaf.shape).items():
            parts.append(_part(shards, device, _bounds(index, leaf)))
            destinations.append(jax.sharding.SingleDeviceSharding(device))
    moved = iter(jax.device_put(parts, destinations))
    copies = [
        jax.make_array_from_single_device_arrays(
            leaf.shape, target, [next(moved) for _ in target.addressable_devices]
        )
        for leaf, target in zip(leaves, targets, strict=True)
    ]
    return jax.block_until_ready(form.unflatten(copies))


def layout(source: Sharding, target: Sharding) -> Sharding:
    """Return a sharding on the devices of `source` that has every part that `target` needs.

    If the number of target devices divides the number of source devices, each source device holds
    as much as a target device will. Otherwise each holds the whole array.
    """
    if not isinstance(source, NamedSharding):
        return source
    copies, rest = divmod(source.num_devices, target.num_devices)
    if rest or not isinstance(target, NamedSharding):
        return NamedSharding(source.mesh, PartitionSpec())
    here: Any = source.mesh.devices
    mesh: Any = target.mesh
    grid = here.reshape(copies, *mesh.devices.shape)
    names, types = ("copy", *mesh.axis_names), (AxisType.Auto,) * grid.ndim
    return NamedSharding(Mesh(grid, names, axis_types=types), target.spec)


def lies_at(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> bool:
    """Return whether each device of `target` already has its part of an array at `source`."""
    parts = source.devices_indices_map(shape)
    return all(parts.get(d) == part for d, part in target.devices_indices_map(shape).items())


@functools.lru_cache(maxsize=64)
def _caster(dtype: Any, shardings: tuple[tuple[Sharding, Sharding], ...]) -> Any:
    """Return a program that copies arrays from the first to the second sharding of each pair."""

    def cast(leaves: Sequence[Any]) -> list[Any]:
        pairs = zip(leaves, shardings, strict=True)
        return [_cast_before_gather(leaf, source, dtype) for leaf, (source, _) in pairs]

    return jax.jit(cast, out_shardings=[target for _, target in shardings])


@functools.lru_cache(maxsize=16)
def _stacker(
    dtype: Any,
    form: Any,
    sources: tuple[Sharding, ...],
    stacked_form: Any,
    layouts: tuple[Sharding, ...],
) -> Any:
    """Return a program that casts and stacks the leaves of a tree of this form."""

    def stack(leaves: Sequence[Any]) -> Params:
        pairs = zip(leaves, sources, strict=True)
        return stack_layers(form.unflatten(_cast_before_gather(*pair, dtype) for pair in pairs))

    return jax.jit(stack, out_shardings=stacked_form.unflatten(layouts))


def _cast_before_gather(leaf: Any, source: Sharding, dtype: Any) -> Any:
    copied = jnp.copy(leaf).astype(dtype)
    if isinstance(source, NamedSharding):  # casting before gathering halves the traffic
        copied = jax.lax.with_sharding_constraint(copied, source)
    return copied


def _bounds(index: Any, leaf: Any) -> _Bounds:
    parts = zip(index, leaf.shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in parts)


def _part(shards: dict[tuple[Any, _Bounds], Any], device: Any, target: _Bounds) -> Any:
    """Return these entries of an array, taken from the device itself if possible."""
    if (device, target) in shards:
        return shards[device, target].data
    same = [shard for (_, bounds), shard in shards.items() if bounds == target]
    if same:
        return same[device.id % len(same)].data
    first, shard = next(  # a larger shard that contains the entries
        ([start for start, _ in bounds], shard)
        for (_, bounds), shard in shards.items()
        if all(a <= c and d <= b for (a, b), (c, d) in zip(bounds, target, strict=True))
    )
    starts, ends = (np.subtract(side, first) for side in zip(*target, strict=True))
    return jax.lax.slice(shard.data, starts.tolist(), ends.tolist())


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copy(params: Params, dtype: Any, stacked: bool) -> Params:
    """Copy and cast, because `device_put` between processes may return an input array unchanged."""
    copied = jax.tree.map(lambda leaf: jnp.copy(leaf).astype(dtype), params)
    return stack_layers(copied) if stacked else copied


def _in_every_process(mesh: Mesh) -> Mesh:
    """Stack the mesh of one process with the same mesh in every other process.

    Raises ConfigError if the processes differ in their number of devices.
    """
    owner = mesh.devices.flat[0].process_index
    order = [device.id for device in jax.devices() if device.process_index == owner]
    positions = [order.index(device.id) for device in mesh.devices.flat]
    grids = []
    for process in range(jax.process_count()):
        devices = [device for device in jax.devices() if device.process_index == process]
        if len(devices) != len(order):
            raise ConfigError(
                f"process {process} has {len(devices)} devices and process {owner} has "
                f"{len(order)}; start all processes with the same number of devices"
            )
        grids.append(np.array([devices[i] for i in positions]).reshape(mesh.devices.shape))
    types = (AxisType.Auto,) * (1 + len(mesh.axis_names))
    return Mesh(np.stack(grids), ("process", *mesh.axis_names), axis_types=types)


def copy_to_host(params: Params, dtype: str) -> HostWeights:
    """Copy the weights in `dtype` to the host, array by array. Cast on the devices.

    If they span several processes, all of them must call this.
    """
    weights: HostWeights = {}
    for path, leaf in flatten(params).items():
        array = np.asarray(to_host(_cast(leaf, jnp.dtype(dtype))))
        is_bfloat16 = array.dtype == jnp.bfloat16
        weights[path] = str(array.dtype), array.view(np.uint16) if is_bfloat16 else array
    return weights


def params_from_host(*parts: HostWeights) -> Params:
    """Return the tree of the weights, in which later arrays replace earlier ones.

    It shares their memory.
    """
    merged = {path: array for part in parts for path, array in part.items()}
    return unflatten({path: array.view(jnp.dtype(name)) for path, (name, array) in merged.items()})


def copy_host_weights(weights: HostWeights) -> HostWeights:
    """Return a copy, for weights whose arrays may be donated."""
    return {path: (dtype, array.copy()) for path, (dtype, array) in weights.items()}
