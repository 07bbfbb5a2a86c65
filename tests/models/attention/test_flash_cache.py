"""Tests of the serving kernels in Pallas's interpreter against attention with all scores."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from lightning_jax.models.attention import flash, flash_cache
from lightning_jax.models.attention.kv_cache import LayerCache, _at_once, attend_cache
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.testing.machine import mesh_for

KERNELS = {"tpu": flash_cache.attend_tpu, "cuda": flash_cache.attend_gpu}


def arrays(rows: int, slots: int, heads: int, members: int, width: int, span: int, dtype: str):
    """Return queries of the first rows, and keys and values of all slots."""
    rng = np.random.default_rng(rows + span)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    queries = normal(rows, heads, members, width, scale=width**-0.5)
    return queries, normal(slots, heads, span, width), normal(slots, heads, span, width)


def check(
    platform: str,
    queries: Any,
    keys: Any,
    values: Any,
    index: Any,
    rows: Any,
    window: int | None = None,
) -> None:
    """Check the interpreted kernel against all scores at once.

    Values that no query of a row may see are huge, so that reading them would fail the check.
    """
    token = np.arange(keys.shape[2])[None, :]
    beyond = token > index.max(axis=1, keepdims=True)
    first = None
    if window is not None:
        first = jnp.asarray(index - window + 1)
        beyond |= token < np.asarray(first).min(axis=1, keepdims=True)
    spoilt = np.where(beyond[:, None, :, None], np.float32(1e30), values[np.array(rows)])
    values = values.at[np.array(rows)].set(spoilt)
    arguments = queries, keys, values, jnp.asarray(index), jnp.asarray(rows, jnp.int32), first
    got = jax.jit(functools.partial(KERNELS[platform], interpret=True))(*arguments)
    np.testing.assert_allclose(got, _at_once(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize(
    ("rows", "slots", "heads", "members", "width", "span"),
    [
        ([0, 1, 2], 5, 2, 3, 16, 384),
        ([3, 1], 4, 1, 7, 32, 128),
        ([2], 3, 12, 1, 16, 256),  # more heads than a TPU takes at once
    ],
)
def test_rows_read_what_they_see(platform, rows, slots, heads, members, width, span) -> None:
    rng = np.random.default_rng(span)
    index = rng.integers(0, span, (len(rows), 1), dtype=np.int32)
    index[-1] = span - 1
    index[:-1][:1] = 0
    made = arrays(len(rows), slots, heads, members, width, span, "float32")
    check(platform, *made, np.repeat(index, members, axis=1), rows)


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize(
    ("rows", "slots", "members", "span", "programs"),
    [
        ([4, 0, 2], 5, 150, 384, 512),  # a GPU: three blocks of queries, the tokens in parts
        ([1, 3], 4, 64, 256, 1),  # one block, one part
        ([0, 1], 2, 7, 640, 40),  # fewer queries than a block has, and parts of unequal size
    ],
)
def test_multiple_tokens_of_any_row(
    platform, rows, slots, members, span, programs, monkeypatch
) -> None:
    monkeypatch.setattr(flash_cache, "_GPU_PROGRAMS", programs)
    monkeypatch.setattr(flash_cache, "_TPU_BLOCK", programs * 32)  # 512: blocks of 128 queries
    index = np.random.default_rng(span).integers(0, span, (len(rows), members), dtype=np.int32)
    index[0] = np.minimum(index[0], 100)  # later tokens are not read
    check(platform, *arrays(len(rows), slots, 2, members, 32, span, "float32"), index, rows)


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("window", [1, 50, 200, 1000])
@pytest.mark.parametrize("programs", [512, 1])
def test_window_ends_reads_before_it(platform, window, programs, monkeypatch) -> None:
    monkeypatch.setattr(flash_cache, "_GPU_PROGRAMS", programs)
    monkeypatch.setattr(flash_cache, "_TPU_BLOCK", 512 * 32)  # blocks of 128 queries
    random = np.random.default_rng(window)
    chunk = 300 + np.arange(150, dtype=np.int32)  # a chunk of a prompt, in three blocks of queries
    index = np.stack([chunk, chunk + 180, random.integers(0, 640, 150, dtype=np.int32)])
    made = arrays(3, 5, 2, 150, 32, 640, "float32")
    check(platform, *made, index, [4, 0, 2], window)
    last = np.array([[639], [0], [200]], np.int32)  # a step of decode
    made = arrays(3, 5, 2, 3, 32, 640, "float32")
    check(platform, *made, np.repeat(last, 3, axis=1), [1, 3, 0], window)


@pytest.mark.parametrize("platform", KERNELS)
def test_blocks_before_the_window_are_not_read(platform) -> None:
    """Check with NaN, because NaN times a weight of 0 is NaN, too."""
    queries, keys, values = arrays(1, 1, 2, 3, 32, 640, "float32")
    values = values.at[:, :, :512].set(jnp.nan)
    index, rows = jnp.full((1, 3), 600), jnp.zeros(1, jnp.int32)
    kernel = jax.jit(functools.partial(KERNELS[platform], interpret=True))
    first = index - 80
    assert np.isfinite(kernel(queries, keys, values, index, rows, first)).all()
    assert np.isnan(kernel(queries, keys, values, index, rows, None)).all()


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("first", [None, [[0, 60], [100, 0]]])
def test_devices_of_a_mesh_take_heads(platform, first) -> None:
    made = arrays(2, 3, 2, 2, 16, 128, "float32")
    numbers = [[5, 70], [127, 0]], [2, 0], first
    rest = tuple(None if n is None else jnp.asarray(n, jnp.int32) for n in numbers)
    mesh = make_mesh(MeshConfig(2, 2, 2))
    sharding = NamedSharding(mesh, jax.P(None, "tensor"))
    kernel = functools.partial(KERNELS[platform], interpret=True)
    split = flash.per_device(kernel, flash_cache.partition_specs)
    got = split(
        *jax.device_put(made, sharding), *jax.device_put(rest, NamedSharding(mesh, jax.P()))
    )
    assert got.sharding.is_equivalent_to(sharding, ndim=4)
    np.testing.assert_allclose(got, jax.jit(kernel)(*made, *rest), rtol=1e-6)


TOKENS = {"decode": 1, "prefill": 128}
MARKS = {"tpu": "tpu_custom_call", "cuda": "triton"}


def shapes_of(program: str, span: int) -> tuple[Any, ...]:
    """Return bfloat16 shapes of `attend_cache`'s arguments with the heads of a 1.5B model."""
    queries = jax.ShapeDtypeStruct((8, TOKENS[program], 12, 128), jnp.bfloat16)
    side = (jax.ShapeDtypeStruct((16, 2, span, 128), jnp.bfloat16),)
    positions = jax.ShapeDtypeStruct(queries.shape[:2], jnp.int32)
    rows = jax.ShapeDtypeStruct((8,), jnp.int32) if program == "prefill" else None
    return queries, LayerCache(side, side, whole=True), positions, rows


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("program", TOKENS)
@pytest.mark.parametrize("platform", MARKS)
def test_a_step_lowers_without_the_device(platform, program, window) -> None:
    attend = jax.jit(functools.partial(attend_cache, window=window))

    def lowered(span: int, platform: str) -> str:
        with jax.sharding.use_abstract_mesh(mesh_for(platform, make_mesh(MeshConfig(1, 1, 1)))):
            traced = attend.trace(*shapes_of(program, span))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert MARKS[platform] in lowered(640, platform)
    assert MARKS[platform] not in lowered(640, "cpu")
    assert MARKS[platform] not in lowered(600, platform)  # pages are shorter than blocks


def check_on_device(platform: str) -> None:
    """Check bfloat16 attention with a 1.5B model's heads on this process's device."""
    if jax.default_backend() != platform:
        pytest.skip(f"JAX sees no {platform} here")
    rng = np.random.default_rng(0)
    some = rng.permutation(24)[:16].astype(np.int32)
    steps = (1, None), (100, some)
    for (number, rows), window in itertools.product(steps, (None, 90)):
        _, keys, values = arrays(16, 24, 2, 6, 128, 1024, "bfloat16")
        queries = jnp.asarray(rng.normal(size=(16, number, 12, 128)), jnp.bfloat16)
        first = rng.integers(0, 1024 - number, (16, 1), dtype=np.int32)
        rest = first + np.arange(number, dtype=np.int32)[None], rows
        attend = jax.jit(functools.partial(attend_cache, window=window))
        got = attend(queries, LayerCache((keys,), (values,), whole=True), *rest)
        with jax.default_device(jax.devices("cpu")[0]):
            host = [jnp.asarray(np.asarray(x)) for x in (queries, keys, values)]
            layer = LayerCache((host[1],), (host[2],), whole=True)
            wanted = attend(host[0], layer, *rest)
        np.testing.assert_allclose(np.float32(got), np.float32(wanted), atol=0.02)


@pytest.mark.tpu
def test_on_a_tpu() -> None:
    check_on_device("tpu")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_device("gpu")
