"""Tests of the measurements of attention alone."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import count_program
from jax.sharding import NamedSharding
from window.attention import (
    DECODES,
    NEEDS_GPU,
    CacheShape,
    RowShape,
    layers_of,
    measure_differences,
    row_kernels,
)
from window.cases import Setting

from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh

TINY = RowShape(rows=2, length=16, heads=4, size=8, trees=2, branches=2)


def test_ends_of_two_trees_by_hand() -> None:
    first = [8, 8, 8, 8, 6, 6, 8, 8]  # four nodes of a prompt and two branches of two
    assert TINY.ends()[0].tolist() == first + [8 + end for end in first]
    assert RowShape(length=4).ends()[0].tolist() == [4, 4, 4, 4]


def test_loop_of_blocks_agrees_with_all_scores() -> None:
    kernels = row_kernels()
    random = np.random.default_rng(0)
    arrays = [
        jnp.asarray(random.normal(size=(2, TINY.length, number, TINY.size)), jnp.float32)
        for number in (4, 2, 2)
    ]
    ends = jnp.asarray(TINY.ends())

    def results(attend: Any) -> Any:
        def loss(*inputs: Any) -> Any:
            return (attend(*inputs, ends) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)

    ours, theirs = (jax.tree.leaves(results(kernels[name])) for name in list(kernels)[2:])
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_differences_on_a_cpu_are_finite_or_need_a_gpu(tmp_path: Path) -> None:
    figures = list(measure_differences(Setting(tmp_path, tmp_path, 60.0, is_tiny=True)))
    assert len({figure.name for figure in figures}) == len(figures)
    missing = [figure.name for figure in figures if figure.note == NEEDS_GPU]
    assert missing == ["Triton: output", "tokamax: output"]
    assert all(figure.value < 1e-5 for figure in figures if figure.name not in missing)


@pytest.mark.gpu_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tokamax's imports
@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")
@pytest.mark.parametrize("name", [name for name in DECODES if name.startswith("tokamax")])
def test_tokamax_decodes_from_the_cache_in_place(name: str, h100: Sequence[Any]) -> None:
    mesh = make_mesh(MeshConfig(fsdp=1), h100)
    place, shape = NamedSharding(mesh, jax.P()), CacheShape(layers=4)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_device(h100[0]):
        decode = DECODES[name](shape)
        first, *rest = decode.kv_shape
        side = (shape.layers * first, *rest)
        arrays = [
            jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=place)
            for sizes in ((shape.slots, 1, shape.heads, shape.size), side, side)
        ]
        counts = count_program(jax.jit(layers_of(decode, shape)).lower(*arrays), 0)
    assert (counts.launches, counts.graphs) == (1, 1)
    assert counts.kernels <= 4 * shape.layers
    layer_bytes = 2 * math.prod(decode.kv_shape)
    assert counts.temp_bytes < layer_bytes / 4  # so no layer of the cache is copied
