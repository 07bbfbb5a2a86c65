"""Tests of the TPU and GPU kernels: interpreted on a CPU, lowered for a platform, and on a device.

To run them on a device: `JAX_PLATFORMS=tpu pytest -m tpu tests/models/attention/test_flash.py` or
`JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/models/attention/`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from random_trees import depths_of, random_ends

from lightning_jax.models.attention import attention, blockwise, flash, flash_gpu, flash_tpu
from lightning_jax.models.attention.blockwise import Window
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.families.table import SHAPES
from lightning_jax.models.mesh import batch_sharding, make_mesh
from lightning_jax.testing.machine import mesh_for

KERNELS = {"tpu": flash_tpu, "gpu": flash_gpu}
TARGETS = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}


def random_inputs(
    ends: Any, heads: int = 4, kv_heads: int = 2, size: int = 16, window: int | None = None
) -> list[Any]:
    """Return (queries, keys, values, index, ends, window, gradient of the output)."""
    rows, length = ends.shape
    random = np.random.default_rng(0)
    queries, keys, values, grad = (
        jnp.asarray(random.normal(size=(rows, length, count, size)), jnp.float32)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    index = jnp.broadcast_to(jnp.arange(length), (rows, length))
    limit = None
    if window is not None:
        limit = Window.of(jnp.asarray(np.stack([depths_of(row) for row in ends])), window)
    return [queries, keys, values, index, jnp.asarray(ends), limit, grad]


@functools.cache
def interpreted(platform: str) -> Any:
    """Return a jitted function from inputs to (output, gradients of queries, keys and values)."""
    kernels = KERNELS[platform]

    def both(*arrays: Any) -> tuple[Any, ...]:
        *inputs, grad = arrays
        out, log_sums = kernels.forward(*inputs, interpret=True)
        return out, *kernels.backward(*inputs, out, log_sums, grad, interpret=True)

    return jax.jit(both)


@jax.jit
def with_all_scores(*arrays: Any) -> Any:
    """Compute the same as `interpreted`, with attention that does not use blocks."""
    queries, keys, values, index, ends, window, grad = arrays
    key = jnp.arange(ends.shape[1])[None, None, :]
    seen = (key <= index[:, :, None]) & (index[:, :, None] < ends[:, None, :])
    if window is not None:
        seen &= window.first[:, :, None] <= window.depths[:, None, :]

    out, backward = jax.vjp(
        lambda q, k, v: attention.attend_masked(q, k, v, seen), queries, keys, values
    )
    return out, *backward(grad)


def assert_agree(platform: str, inputs: list[Any]) -> None:
    ours, theirs = interpreted(platform)(*inputs), with_all_scores(*inputs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


LENGTH = 260  # three blocks of 128 or five of 64, the last mostly padding


def random_rows(seed: int) -> np.ndarray:
    """Return the ends of four rows: bushes, trees, trees with long paths, and one path."""
    depths = enumerate((0.4, 0.7, 0.95, 1.0))
    return np.stack([random_ends(LENGTH, seed + row, depth) for row, depth in depths])


@pytest.mark.parametrize("platform", KERNELS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=5, deadline=None, derandomize=True)
def test_random_forests_agree_with_all_scores_at_once(platform: str, seed: int) -> None:
    assert_agree(platform, random_inputs(random_rows(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("length", [1, 63, 129, 600, 1500])
@pytest.mark.parametrize("size", [64, 96])
def test_lengths_and_head_sizes(platform: str, length: int, size: int) -> None:
    ends = np.stack([random_ends(length, 1, 0.97), random_ends(length, 2, 0.99)])
    assert_agree(platform, random_inputs(ends, heads=9, kv_heads=3, size=size))


def assert_near(ours: Any, theirs: Any, atol: float) -> None:
    """Check that arrays agree within `atol` times the largest number of the second one."""
    for a, b in zip(ours, theirs, strict=True):
        scale = np.abs(b).max()
        np.testing.assert_allclose(np.float32(a) / scale, b / scale, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("platform", KERNELS)
def test_bfloat16(platform: str) -> None:
    inputs = random_inputs(random_rows(1), size=64)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 4 else x, inputs)
    ours = interpreted(platform)(*narrow)
    assert {x.dtype for x in ours} == {jnp.dtype(jnp.bfloat16)}
    assert_near(ours, with_all_scores(*inputs), atol=0.02)


@pytest.mark.parametrize("platform", KERNELS)
def test_blocks_that_nobody_sees_are_not_computed(platform: str) -> None:
    """Check with NaN in skipped blocks, because NaN in any factor gives NaN in the product."""
    ends = np.where(np.arange(LENGTH) < 128, 128, LENGTH)[None].repeat(4, 0)
    queries, keys, values, *rest = random_inputs(ends)
    inputs = [queries, *(x.at[:, :128].set(jnp.nan) for x in (keys, values)), *rest]
    for x in interpreted(platform)(*inputs):
        assert np.isnan(x[:, :128]).any() and np.isfinite(x[:, 128:]).all()


def test_blocks_that_meet_by_hand() -> None:
    ends = np.where(np.arange(LENGTH) < 128, 128, LENGTH)[None].repeat(4, 0)
    blocks = blockwise.split_blocks(*random_inputs(ends)[:6], sizes=(512, 256, 128))
    assert blocks.size == 128 and blocks.queries.shape == (4, 2, 2, 384, 16)
    assert blocks.visible[0].tolist() == [
        [True, False, False],
        [False, True, False],
        [False, True, True],
    ]


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("window", [1, 70])
def test_windows_agree_with_all_scores_at_once(platform: str, window: int) -> None:
    assert_agree(platform, random_inputs(random_rows(7), window=window))


@pytest.mark.parametrize("platform", KERNELS)
def test_window_as_long_as_the_row_changes_nothing(platform: str) -> None:
    rows = random_rows(3)
    both = [random_inputs(rows, window=size) for size in (LENGTH, None)]
    for a, b in zip(*(interpreted(platform)(*inputs) for inputs in both), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("platform", KERNELS)
def test_blocks_before_the_window_are_not_computed(platform: str) -> None:
    queries, keys, values, *rest = random_inputs(np.full((4, LENGTH), LENGTH), window=20)
    # Queries from 256 on see keys from 237 on, and no block with a key before 128.
    inputs = [queries, *(x.at[:, :128].set(jnp.nan) for x in (keys, values)), *rest]
    out, query_grads, _, _ = interpreted(platform)(*inputs)
    for x in (out, query_grads):
        assert np.isnan(x[:, :128]).all() and np.isfinite(x[:, 256:]).all()


def test_blocks_that_meet_in_a_window_by_hand() -> None:
    # A trunk of 130 nodes has two branches of 65. Each node sees 67 nodes.
    ends = np.full((1, LENGTH), LENGTH)
    ends[:, 130:195] = 195
    inputs = random_inputs(ends, window=67)
    assert inputs[5].depths[0, [129, 130, 194, 195, 259]].tolist() == [129, 130, 194, 130, 194]
    blocks = blockwise.split_blocks(*inputs[:6], sizes=(64,))
    # Blocks begin at 0, 64, 128, 192 and 256. Their queries' smallest depths are 0, -2, 62, 64 and
    # 125: those of nodes 0, 64, 128, 195 and 256.
    assert blocks.visible[0].tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, True, True, False, False],
        [False, True, True, True, False],
        [False, True, True, True, True],
    ]


def test_pairs_by_hand() -> None:
    visible = jnp.array([[[True, False], [True, True]], [[False, False], [False, True]]])
    pairs, counts = flash_tpu.list_pairs(visible)
    second = 1 << 16
    # In row 1 the first block meets none and is paired with block 0.
    assert pairs.tolist() == [[0, second, second + 1, second + 1], [0, *[second + 1] * 3]]
    assert counts.tolist() == [3, 2]


SIZES, PLACE = (2, 2, 2), jax.P(("data", "fsdp"), None, "tensor")


def per_device(platform: str) -> tuple[Any, Any]:
    """Return a platform's interpreted (forward, backward), run on each device for its part."""
    kernels = KERNELS[platform]
    forward, backward = (
        flash.per_device(functools.partial(kernel, interpret=True), attention.partition_specs)
        for kernel in (kernels.forward, kernels.backward)
    )
    return forward, backward


@pytest.mark.parametrize("window", [None, 70])
def test_devices_compute_their_rows_and_heads(window: int | None) -> None:
    mesh = make_mesh(MeshConfig(*SIZES))
    inputs = random_inputs(random_rows(1), window=window)
    out, _ = jax.jit(per_device("tpu")[0])(*jax.device_put(inputs[:6], batch_sharding(mesh)))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, PLACE), 4)
    np.testing.assert_allclose(out, with_all_scores(*inputs)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("window", [None, 70])
def test_devices_compute_the_gradients_of_their_rows_and_heads(
    platform: str, window: int | None
) -> None:
    mesh = make_mesh(MeshConfig(*SIZES))
    inputs = random_inputs(random_rows(1), window=window)
    forward, backward = per_device(platform)

    @jax.jit
    def both(*arrays: Any) -> Any:
        *inputs, grad = arrays
        out, log_sums = forward(*inputs)
        return out, *backward(*inputs, out, log_sums, grad)

    ours = both(*jax.device_put(inputs, batch_sharding(mesh)))
    for a, b in zip(ours, with_all_scores(*inputs), strict=True):
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, PLACE), 4)
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def lowered(
    platform: str, model: str, sizes: tuple[int, int, int], window: int | None, length: int = 4096
) -> str:
    """Lower the program of a gradient for eight devices of a platform."""
    mixer = SHAPES[model].blocks[0].mixer
    mesh = make_mesh(MeshConfig(*sizes))
    rows = NamedSharding(mesh_for(platform, mesh), batch_sharding(mesh).spec)
    tokens, numbers = (4, length), jax.ShapeDtypeStruct((4, length), jnp.int32, sharding=rows)
    arrays = [
        jax.ShapeDtypeStruct((*tokens, count, mixer.head_dim), jnp.bfloat16, sharding=rows)
        for count in (mixer.heads, mixer.kv_heads, mixer.kv_heads)
    ]

    def loss(queries: Any, keys: Any, values: Any, ends: Any, depths: Any) -> Any:
        limit = None if window is None else Window.of(depths, window)
        out = attention.attend_tree(queries, keys, values, ends, limit)
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays, numbers, numbers)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize(
    ("model", "sizes", "window"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", (1, 4, 2), None),
        ("Qwen/Qwen3-8B", (1, 2, 4), None),
        ("Qwen/Qwen3-8B", (1, 2, 4), 512),
    ],
)
def test_training_shapes_lower(
    platform: str, model: str, sizes: tuple[int, int, int], window: int | None
) -> None:
    text = lowered(platform, model, sizes, window)
    # Three kernels: forward, gradient of queries, gradient of keys and values. No T x T array.
    assert text.count(f"custom_call @{TARGETS[platform]}(") == 3
    assert "4096x4096" not in text


def check_on_device(platform: str) -> None:
    """Check float32 to 1e-4 of the largest number, and bfloat16, which has 8 bits, to 2 %."""
    if jax.default_backend() != platform:
        pytest.skip(f"JAX sees no {platform} here")
    ends = np.stack([random_ends(3000, 1, 0.99), random_ends(3000, 2, 0.9)])
    for dtype, size, atol in ((jnp.float32, 64, 1e-4), (jnp.bfloat16, 128, 0.02)):
        for window in (None, 300):
            inputs = random_inputs(ends, 9, 3, size, window)
            arrays, (_, tree_ends, limit, grad) = inputs[:3], inputs[3:]
            attend = functools.partial(attention.attend_tree, ends=tree_ends, window=limit)
            with jax.default_matmul_precision("highest"):
                out, backward = jax.vjp(jax.jit(attend), *(x.astype(dtype) for x in arrays))
                ours = (out, *backward(grad.astype(dtype)))
                theirs = with_all_scores(*inputs)
            assert_near(ours, theirs, atol)


@pytest.mark.tpu
def test_on_a_tpu() -> None:
    check_on_device("tpu")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_device("gpu")
