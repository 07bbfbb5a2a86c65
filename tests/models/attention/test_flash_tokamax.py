"""Tests of tokamax's kernels: the choice of them, their mask, and what XLA makes of them.

Tests that run or compile them are skipped without the extra `tokamax`.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import count_program
from jax.sharding import NamedSharding
from random_trees import random_ends

from lightning_jax.models import tokamax_library
from lightning_jax.models.attention import attention, flash_gpu, flash_tokamax
from lightning_jax.models.attention.blockwise import Window
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import batch_sharding, make_mesh
from lightning_jax.train.memory.targets import target_devices

needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="the extra tokamax is not installed"
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its imports


LENGTH = 260  # not a multiple of the kernels' blocks
ENDS = np.stack([random_ends(LENGTH, row, depth) for row, depth in enumerate((0.4, 0.9, 1.0))])


def test_roots_are_the_first_keys_that_queries_see() -> None:
    index = np.arange(LENGTH)
    seen = (index <= index[:, None]) & (index[:, None] < ENDS[:, None])
    np.testing.assert_array_equal(flash_tokamax._roots(jnp.asarray(ENDS)), seen.argmax(axis=2))
    # A tree of 2 nodes, one of 4 with two branches, and a node that sees only itself.
    by_hand = flash_tokamax._roots(jnp.array([[2, 2, 6, 4, 6, 6, 7]]))
    assert by_hand.tolist() == [[0, 0, 2, 2, 2, 2, 6]]


HOPPER = {"platform": "gpu", "compute_capability": "9.0"}


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "expected"),
    [
        (HOPPER, (1, 512, 4, 64), "bfloat16", flash_tokamax),
        (HOPPER | {"compute_capability": "10.3"}, (1, 512, 4, 64), "bfloat16", flash_tokamax),
        (HOPPER | {"compute_capability": "8.0"}, (1, 512, 4, 64), "bfloat16", flash_gpu),
        (HOPPER | {"compute_capability": "12.0"}, (1, 512, 4, 64), "bfloat16", flash_gpu),
        (HOPPER, (1, 512, 4, 64), "float32", flash_gpu),
        (HOPPER, (1, 512, 4, 256), "bfloat16", flash_gpu),
        (HOPPER, (1, 16384, 4, 64), "bfloat16", flash_gpu),
        ({"platform": "tpu"}, (1, 512, 4, 64), "bfloat16", flash_gpu),
    ],
)
def test_kernels_fit_the_device_and_the_arrays(
    device: dict[str, str], shape: Any, dtype: str, expected: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(flash_tokamax, "get_default_device", lambda: SimpleNamespace(**device))
    monkeypatch.setattr(flash_tokamax, "is_installed", lambda: True)
    queries = jax.ShapeDtypeStruct(shape, dtype)
    assert attention._for_gpu(queries, None) is expected
    window = Window.of(jnp.zeros(shape[:2], jnp.int32), 4)
    assert attention._for_gpu(queries, window) is flash_gpu
    monkeypatch.setattr(flash_tokamax, "is_installed", lambda: False)
    assert attention._for_gpu(queries, None) is flash_gpu


def test_library_of_another_version_leaves_the_other_kernels(monkeypatch: Any, caplog: Any) -> None:
    def broken(name: str) -> Any:
        raise AttributeError("module 'hijax' has no attribute 'HiPrimitive'")

    monkeypatch.setattr(tokamax_library, "is_installed", lambda name: True)
    monkeypatch.setattr(importlib, "import_module", broken)
    can_import = tokamax_library.can_import.__wrapped__  # without its cache
    assert not can_import("tokamax", "others are used")
    assert len(caplog.records) == 1
    monkeypatch.setattr(tokamax_library, "is_installed", lambda name: False)
    assert not can_import("tokamax", "others are used") and len(caplog.records) == 1


@functools.cache
def inputs(dtype: str, heads: int = 4, kv_heads: int = 2, size: int = 16) -> list[Any]:
    """Return (queries, keys, values, gradient of the output)."""
    random = np.random.default_rng(0)
    return [
        jnp.asarray(random.normal(size=(len(ENDS), LENGTH, count, size)), dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


@jax.jit
def with_tokamax(queries: Any, keys: Any, values: Any, grad: Any) -> tuple[Any, ...]:
    arrays = queries, keys, values, None, jnp.asarray(ENDS), None
    out, log_sums = flash_tokamax.forward(*arrays, interpret=True)
    return out, *flash_tokamax.backward(*arrays, out, log_sums, grad, interpret=True)


@jax.jit
def with_all_scores(queries: Any, keys: Any, values: Any, grad: Any) -> tuple[Any, ...]:
    index = np.arange(LENGTH)
    seen = jnp.asarray((index <= index[:, None]) & (index[:, None] < ENDS[:, None]))
    attend = functools.partial(attention.attend_masked, seen=seen)
    out, backward = jax.vjp(attend, queries, keys, values)
    return out, *backward(grad)


@needs_tokamax
def test_output_and_gradients_agree_with_all_scores_at_once() -> None:
    ours, theirs = with_tokamax(*inputs("float32")), with_all_scores(*inputs("float32"))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@needs_tokamax
def test_bfloat16_agrees_with_all_scores_at_once() -> None:
    ours, theirs = with_tokamax(*inputs("bfloat16")), with_all_scores(*inputs("float32"))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == jnp.bfloat16
        scale = np.abs(b).max()
        np.testing.assert_allclose(np.float32(a) / scale, b / scale, atol=0.02)


@contextlib.contextmanager
def compiling(config: MeshConfig, devices: Sequence[Any]) -> Iterator[Any]:
    """Compile for a mesh of GPUs that are not here."""
    mesh = make_mesh(config, devices)
    caching = jax.config.jax_enable_compilation_cache  # pyright: ignore
    jax.config.update("jax_enable_compilation_cache", False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_device(devices[0]):
        yield mesh
    jax.config.update("jax_enable_compilation_cache", caching)


def lowered_gradient(mesh: Any, length: int, heads: tuple[int, int], size: int) -> Any:
    place = NamedSharding(mesh, batch_sharding(mesh).spec)
    arrays = [
        jax.ShapeDtypeStruct((4, length, number, size), jnp.bfloat16, sharding=place)
        for number in (heads[0], heads[1], heads[1])
    ]
    ends = jax.ShapeDtypeStruct((4, length), jnp.int32, sharding=place)

    def loss(queries: Any, keys: Any, values: Any, ends: Any) -> Any:
        return attention.attend_tree(queries, keys, values, ends).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays, ends)


@needs_tokamax
@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("length", "heads", "size", "temp_mb"),
    [
        (4096, (12, 2), 128, 190),  # Qwen2.5-1.5B; 134 MB are the mask and its transpose
        (4096, (9, 3), 64, 160),
        (1000, (8, 4), 96, 40),
    ],
)
def test_gradient_is_three_kernels_in_one_graph(
    length: int, heads: tuple[int, int], size: int, temp_mb: int, h100: Sequence[Any]
) -> None:
    with compiling(MeshConfig(fsdp=1), h100) as mesh:
        lowered = lowered_gradient(mesh, length, heads, size)
        text, counts = lowered.as_text(), count_program(lowered, 0)
    assert text.count("custom_call @mosaic_gpu_v2(") == 3
    assert "__gpu$xla.gpu.triton" not in text
    assert (counts.launches, counts.graphs, counts.reads) == (1, 1, 0)
    assert counts.kernels <= 30
    assert counts.temp_bytes <= temp_mb * 1e6


@needs_tokamax
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"fsdp": 1, "tensor": 2}], ids=str)
def test_two_gpus_run_three_kernels_each(sizes: dict[str, int], h100: Sequence[Any]) -> None:
    devices, _ = target_devices("h100:2")
    with compiling(MeshConfig(**sizes), devices) as mesh:
        lowered = lowered_gradient(mesh, 512, (8, 4), 64)
        assert count_program(lowered, 0).reads == 0
    assert lowered.as_text().count("custom_call @mosaic_gpu_v2(") == 3
