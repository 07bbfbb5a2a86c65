"""Tests of weights on the host."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.cluster.weights import copied, on_host, received
from lightning_jax.models.config import LoraConfig, MeshConfig
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import adapted, trained_part
from lightning_jax.models.sharding import make_mesh, param_shardings, put_on_mesh
from lightning_jax.testing.tiny import tiny_model

MODEL = tiny_model(num_layers=1)


def equal(ours: Any, theirs: Any) -> bool:
    pairs = zip(flatten(ours).items(), flatten(theirs).items(), strict=True)
    return all(a == b and bool(jnp.array_equal(x, y)) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_weights_arrive_whole_and_cast(dtype: str) -> None:
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    params = put_on_mesh(MODEL.params, param_shardings(MODEL.config, mesh))
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), MODEL.params)
    assert equal(received(on_host(params, dtype)), cast)


def test_pickle_takes_all_arrays_out_of_band() -> None:
    sent, buffers = on_host(MODEL.params, "bfloat16"), list[pickle.PickleBuffer]()
    pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    assert sum(len(memoryview(buffer).cast("B")) for buffer in buffers) == sum(
        leaf.nbytes // 2 for leaf in jax.tree.leaves(MODEL.params)
    )


def test_adapters_replace_those_of_the_first_weights() -> None:
    model = adapted(MODEL, LoraConfig(rank=2), seed=0)
    newer = jax.tree.map(lambda leaf: leaf + 1, trained_part(model.params))
    whole, adapters = on_host(model.params, "float32"), on_host(newer, "float32")
    assert len(adapters) < len(whole)
    merged = received(whole, adapters)
    assert equal(trained_part(merged), newer) and len(flatten(merged)) == len(whole)


def test_a_copy_outlives_what_it_was_made_of() -> None:
    params = jax.tree.map(jnp.copy, MODEL.params)
    kept = copied(on_host(params, "float32"))
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert equal(received(kept), MODEL.params)
    assert all(isinstance(array, np.ndarray) for _, array in kept.values())
