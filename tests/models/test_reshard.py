"""Tests of copying weights to engines: the result, the copies made, and no read by the host."""

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import array as jax_array
from jax.sharding import Mesh

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.replicas import split_by_data
from lightning_jax.models import reshard as module
from lightning_jax.models.config import LoraConfig, MeshConfig
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import ADAPTER_LEAVES, adapted, trained_part
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.reshard import copy_host_weights, copy_to_host, params_from_host, reshard
from lightning_jax.models.sharding import param_shardings, put_on_mesh, stacked_shardings
from lightning_jax.models.transformer import init_params, layer_of
from lightning_jax.testing.tiny import tiny_model

MODEL = tiny_model(num_layers=1)
SHAPE = MODEL.config.with_shape(vocab_size=264)
SERVE = ServeConfig(slots=2, max_len=32, prefill_buckets=(16,))


def weights(mesh: Mesh) -> Any:
    return put_on_mesh(init_params(SHAPE, jax.random.key(0)), param_shardings(SHAPE, mesh))


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the sizes of arrays that are read on the host."""
    sizes: list[int] = []
    value: Any = jax_array.ArrayImpl._value

    def read(array: Any) -> Any:
        sizes.append(array.size)
        return value.fget(array)

    monkeypatch.setattr(jax_array.ArrayImpl, "_value", property(read))
    with jax.transfer_guard_device_to_host("disallow"):
        yield sizes


def turned(mesh: Mesh) -> Mesh:
    """Return the mesh with its devices in reverse order."""
    return Mesh(mesh.devices[:, ::-1], mesh.axis_names, axis_types=mesh.axis_types)


@pytest.mark.parametrize(
    ("training", "serving"),
    [
        (make_mesh(MeshConfig(1, 8, 1)), make_mesh(MeshConfig(1, 1, 1))),
        (make_mesh(MeshConfig(1, 8, 1)), make_mesh(MeshConfig(1, 1, 1, first_device=5))),
        (make_mesh(MeshConfig(2, 2, 2)), make_mesh(MeshConfig(1, 1, 2, first_device=2))),
        (make_mesh(MeshConfig(1, 4, 2)), make_mesh(MeshConfig(1, 1, 8))),
        (make_mesh(MeshConfig(1, 8, 1)), turned(make_mesh(MeshConfig(1, 8, 1)))),
        (make_mesh(MeshConfig(1, 2, 2)), make_mesh(MeshConfig(1, 2, 2, first_device=4))),
        (make_mesh(MeshConfig(1, 6, 1)), make_mesh(MeshConfig(1, 1, 2, first_device=6))),
        (make_mesh(MeshConfig(1, 3, 1)), make_mesh(MeshConfig(1, 2, 1, first_device=6))),
        (make_mesh(MeshConfig(1, 1, 1)), make_mesh(MeshConfig(1, 2, 2, first_device=1))),
        (make_mesh(MeshConfig(1, 2, 1)), make_mesh(MeshConfig(1, 2, 4))),
    ],
)
def test_weights_reach_any_devices_without_the_host(
    training: Mesh, serving: Mesh, host_reads: list[int]
) -> None:
    with jax.transfer_guard_device_to_host("allow"):
        params = weights(training)
        wanted = [np.asarray(leaf).astype(jnp.bfloat16) for leaf in jax.tree.leaves(params)]
    host_reads.clear()
    shardings = param_shardings(SHAPE, serving)
    served = reshard(params, shardings, jnp.bfloat16)
    assert host_reads == []
    jax.tree.map(lambda leaf: leaf.delete(), params)  # like the next update, which donates them
    with jax.transfer_guard_device_to_host("allow"):
        for leaf, target, value in zip(
            *map(jax.tree.leaves, (served, shardings)), wanted, strict=True
        ):
            assert leaf.sharding == target
            np.testing.assert_array_equal(leaf, value)


@pytest.mark.parametrize(
    ("training", "serving"),
    [
        (make_mesh(MeshConfig(1, 8, 1)), make_mesh(MeshConfig(1, 1, 1, first_device=5))),
        (make_mesh(MeshConfig(2, 2, 2)), make_mesh(MeshConfig(1, 1, 2, first_device=2))),
        (make_mesh(MeshConfig(1, 2, 1)), make_mesh(MeshConfig(1, 2, 4))),
    ],
)
def test_layers_arrive_stacked_by_kind(
    training: Mesh, serving: Mesh, host_reads: list[int], compiled: list[str]
) -> None:
    with jax.transfer_guard_device_to_host("allow"):
        params = weights(training)
        cast = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), params)
    shardings = stacked_shardings(param_shardings(SHAPE, serving))
    reshard(params, shardings, jnp.bfloat16, stacked=True)
    host_reads.clear()
    compiled.clear()
    served = reshard(params, shardings, jnp.bfloat16, stacked=True)
    assert host_reads == [] and compiled == []
    with jax.transfer_guard_device_to_host("allow"):
        for leaf, target in zip(*map(jax.tree.leaves, (served, shardings)), strict=True):
            assert leaf.sharding == target and leaf.dtype == jnp.bfloat16
        layers = {f"layers_{i}": layer_of(served, i) for i in range(SHAPE.shape.num_layers)}
        others = {name: leaf for name, leaf in served.items() if name != "layers"}
        jax.tree.map(np.testing.assert_array_equal, layers | others, cast)
    assert served["layers"]["q"]["kernel"].sharding.spec[0] is None


def test_a_copy_in_the_same_dtype_survives_the_donation_of_the_original() -> None:
    training = make_mesh(MeshConfig(1, 2, 2))
    params = weights(training)
    copied = reshard(params, param_shardings(SHAPE, training), jnp.float32)
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(copied))


def replicas(training: Mesh, dtype: str) -> tuple[Any, Engine]:
    """Build weights split over eight devices, and an engine with a replica on each device."""
    config = SHAPE.with_shape(tie_embeddings=True)
    params = weights(training)
    model = dataclasses.replace(MODEL, config=config, params=params)
    mesh = Mesh(training.devices.reshape(8, 1, 1, 1), training.axis_names)
    return params, Engine(model, SERVE, dtype=dtype, mesh=mesh)


def test_engines_of_one_run_gather_once_and_read_nothing_on_the_host(
    host_reads: list[int], monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    with jax.transfer_guard_device_to_host("allow"):
        params, engine = replicas(make_mesh(MeshConfig(1, 8, 1)), "bfloat16")
    gathered, original = [], module.prepare_copy

    def counted(*args: Any, **more: Any) -> Any:
        gathered.append(original(*args, **more))
        return gathered[-1]

    monkeypatch.setattr("lightning_jax.engine.device.slots.prepare_copy", counted)
    host_reads.clear()
    compiled.clear()
    engine.publish(params)
    assert host_reads == [] and len(gathered) == 1
    assert compiled == []  # reuses the first weights' program
    (copy,) = gathered
    for number, replica in enumerate(engine._loops):  # each has its part of the one copy
        embedding = replica._inbox.weights["embed"]["embedding"]
        assert embedding.devices() == {jax.devices()[number]}
        shard = copy.params["embed"]["embedding"].addressable_shards[number].data
        assert embedding.unsafe_buffer_pointer() == shard.unsafe_buffer_pointer()
    engine.close()


@pytest.mark.parametrize(("dtype", "is_shared"), [("bfloat16", True), ("float32", False)])
def test_frozen_weights_are_shared_where_they_lie_as_the_engine_reads_them(
    dtype: str, is_shared: bool
) -> None:
    model = adapted(MODEL, LoraConfig(rank=2), 0)
    mesh = make_mesh(MeshConfig(1, 1, 1))
    shardings = param_shardings(model.config, mesh)
    loaded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    params = put_on_mesh(loaded, shardings)
    engine = SlotPrograms(model.config, SERVE, dtype=dtype, mesh=mesh)

    def pointers(tree: Any) -> dict:
        return {path: leaf.unsafe_buffer_pointer() for path, leaf in flatten(tree).items()}

    def same(tree: Any) -> set:
        ours = pointers(tree)
        return {path for path, at in pointers(params).items() if ours.get(path) == at}

    kept = engine.put_on_mesh(engine.prepare_copy(params, share_base=True))
    assert same(kept) == (
        {path for path in flatten(params) if path[-1] not in ADAPTER_LEAVES} if is_shared else set()
    )
    assert same(engine.put_on_mesh(params)) == set()
    assert same(engine.put_on_mesh(engine.prepare_copy(params))) == set()
    jax.tree.map(lambda leaf: leaf.delete(), trained_part(params))  # an update donates them
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(kept))


def test_devices_that_hold_the_whole_base_share_it_with_their_engine() -> None:
    model = adapted(MODEL, LoraConfig(rank=2), 0)
    mesh = make_mesh(MeshConfig(data=8, fsdp=1, tensor=1))
    loaded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    params = put_on_mesh(loaded, param_shardings(model.config, mesh))
    engines = [
        SlotPrograms(model.config, SERVE, dtype="bfloat16", mesh=part)
        for part in split_by_data(mesh)
    ]
    copy = engines[0].prepare_copy(params, share_base=True)
    for number, engine in enumerate(engines):
        kernel = engine.put_on_mesh(copy)["layers_0"]["q"]["kernel"]
        held = params["layers_0"]["q"]["kernel"].addressable_shards[number].data
        assert kernel.unsafe_buffer_pointer() == held.unsafe_buffer_pointer()


def are_equal(ours: Any, theirs: Any) -> bool:
    pairs = zip(flatten(ours).items(), flatten(theirs).items(), strict=True)
    return all(a == b and bool(jnp.array_equal(x, y)) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_weights_arrive_whole_and_cast(dtype: str) -> None:
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    params = put_on_mesh(MODEL.params, param_shardings(MODEL.config, mesh))
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), MODEL.params)
    assert are_equal(params_from_host(copy_to_host(params, dtype)), cast)


def test_pickle_takes_all_arrays_out_of_band() -> None:
    sent, buffers = copy_to_host(MODEL.params, "bfloat16"), list[pickle.PickleBuffer]()
    pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    assert sum(len(memoryview(buffer).cast("B")) for buffer in buffers) == sum(
        leaf.nbytes // 2 for leaf in jax.tree.leaves(MODEL.params)
    )


def test_adapters_replace_those_of_the_first_weights() -> None:
    model = adapted(MODEL, LoraConfig(rank=2), seed=0)
    newer = jax.tree.map(lambda leaf: leaf + 1, trained_part(model.params))
    whole, adapters = copy_to_host(model.params, "float32"), copy_to_host(newer, "float32")
    assert len(adapters) < len(whole)
    merged = params_from_host(whole, adapters)
    assert are_equal(trained_part(merged), newer) and len(flatten(merged)) == len(whole)


def test_a_copy_outlives_what_it_was_made_of() -> None:
    params = jax.tree.map(jnp.copy, MODEL.params)
    kept = copy_host_weights(copy_to_host(params, "float32"))
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert are_equal(params_from_host(kept), MODEL.params)
    assert all(isinstance(array, np.ndarray) for _, array in kept.values())
