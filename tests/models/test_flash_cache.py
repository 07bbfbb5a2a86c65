"""The kernels of serving, run by Pallas's interpreter, against attention with all scores."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from lightning_jax.config import MeshConfig
from lightning_jax.models import flash_cache
from lightning_jax.models.cache import _attend_rows, attend_cache, segment_lengths
from lightning_jax.models.sharding import make_mesh
from lightning_jax.testing.platforms import mesh_for


def token_on_gpu(queries, keys, values, index, *, interpret: bool):
    """The GPU's kernel with what the TPU's takes: one token for each of the first rows."""
    limits = jnp.repeat(index[:, None], queries.shape[2], axis=1)
    rows = jnp.arange(len(queries), dtype=jnp.int32)
    return flash_cache.attend_gpu(queries, keys, values, limits, rows, interpret=interpret)


KERNELS = {"tpu": flash_cache.attend_tpu, "cuda": token_on_gpu}


def arrays(rows: int, slots: int, heads: int, members: int, width: int, span: int, dtype: str):
    rng = np.random.default_rng(rows + span)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    queries = normal(rows, heads, members, width, scale=width**-0.5)
    index = rng.integers(-3, span + 3, rows, dtype=np.int32)
    index[:2] = -1, span + 1  # nothing of the segment, and all of it
    keys, values = normal(slots, heads, width, span), normal(slots, heads, span, width)
    return queries, keys, values, jnp.asarray(index)


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize(
    ("rows", "slots", "heads", "members", "width", "span"),
    [(3, 5, 2, 3, 16, 384), (2, 2, 1, 7, 24, 128)],
)
def test_rows_read_what_they_see(platform, rows, slots, heads, members, width, span) -> None:
    queries, keys, values, index = arrays(rows, slots, heads, members, width, span, "float32")
    # What no row may see would spoil everything.
    last = np.append(index, [span] * (slots - rows))
    beyond = np.arange(span)[None, :] > last[:, None]
    values = jnp.asarray(np.where(beyond[:, None, :, None], np.float32(1e30), values))
    kernel = functools.partial(KERNELS[platform], interpret=True)
    got = jax.jit(kernel)(queries, keys, values, index)
    plain = jax.jit(_attend_rows)
    wanted = plain(queries, keys[:rows], values[:rows], index[:, None])
    seen = np.asarray(index) >= 0
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours[seen], theirs[seen], rtol=1e-5, atol=1e-5)
    assert np.asarray(got[0])[~seen].max() < -1e29  # so that its part weighs nothing
    assert np.isfinite(np.asarray(got[2])[~seen]).all()


@pytest.mark.parametrize(
    ("rows", "slots", "members", "span", "programs"),
    [
        ([4, 0, 2], 5, 150, 384, 512),  # three blocks of queries, the tokens in parts
        ([1, 3], 4, 64, 256, 1),  # one block, one part
        ([0, 1], 2, 7, 640, 40),  # fewer queries than a block has; parts that do not come out even
    ],
)
def test_a_gpu_reads_several_tokens_of_any_row(
    rows, slots, members, span, programs, monkeypatch
) -> None:
    monkeypatch.setattr(flash_cache, "_GPU_PROGRAMS", programs)
    queries, keys, values, _ = arrays(len(rows), slots, 2, members, 24, span, "float32")
    rng = np.random.default_rng(span)
    index = rng.integers(0, span + 3, (len(rows), members), dtype=np.int32)
    index[0] = np.minimum(index[0], 100)  # what lies further on is not read
    beyond = np.arange(span)[None, :] > index[0].max()
    values = values.at[rows[0]].set(jnp.where(beyond[0][None, :, None], 1e30, values[rows[0]]))
    chosen = jnp.asarray(rows, jnp.int32)
    kernel = jax.jit(functools.partial(flash_cache.attend_gpu, interpret=True))
    got = kernel(queries, keys, values, jnp.asarray(index), chosen)
    wanted = jax.jit(_attend_rows)(queries, keys, values, jnp.asarray(index), chosen)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_row_as_few_segments_as_the_kernels_take() -> None:
    assert segment_lengths(4096, whole=True) == (4096,)
    assert segment_lengths(1600, whole=True) == (1536, 64)
    assert segment_lengths(100, whole=True) == (100,)


@pytest.mark.parametrize("platform", KERNELS)
def test_devices_of_a_mesh_take_heads(platform) -> None:
    queries, keys, values, index = arrays(2, 3, 2, 2, 16, 128, "float32")
    rest = (index,)
    if platform == "cuda":
        rest = jnp.repeat(index[:, None], 2, axis=1), jnp.asarray([2, 0], jnp.int32)
    mesh = make_mesh(MeshConfig(2, 2, 2))
    place = NamedSharding(mesh, jax.P(None, "tensor"))
    placed = [jax.device_put(each, place) for each in (queries, keys, values)]
    kernel = flash_cache.attend_gpu if platform == "cuda" else flash_cache.attend_tpu
    kernel = functools.partial(kernel, interpret=True)
    split = jax.jit(functools.partial(flash_cache.per_device, kernel))
    got = split(*placed, *jax.device_put(rest, NamedSharding(mesh, jax.P())))
    assert got[2].sharding.is_equivalent_to(place, ndim=4)
    whole = jax.jit(kernel)(queries, keys, values, *rest)
    for ours, theirs in zip(got, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


TOKENS = {"decode": 1, "prefill": 128}


def shapes_of(program: str) -> tuple[Any, ...]:
    """The arguments of `attend_cache` with the heads of a 1.5B model, bfloat16; two segments, of
    which the second is odd.
    """
    queries = jax.ShapeDtypeStruct((8, TOKENS[program], 12, 128), jnp.bfloat16)
    spans = (512, 100)
    keys = tuple(jax.ShapeDtypeStruct((16, 2, 128, span), jnp.bfloat16) for span in spans)
    values = tuple(jax.ShapeDtypeStruct((16, 2, span, 128), jnp.bfloat16) for span in spans)
    positions = jax.ShapeDtypeStruct(queries.shape[:2], jnp.int32)
    rows = jax.ShapeDtypeStruct((8,), jnp.int32) if program == "prefill" else None
    return queries, keys, values, positions, rows


@pytest.mark.parametrize(
    ("platform", "program", "mark"),
    [
        ("tpu", "decode", "tpu_custom_call"),
        ("cuda", "decode", "triton"),
        ("cuda", "prefill", "triton"),
    ],
)
def test_a_step_lowers_without_the_device(platform, program, mark) -> None:
    with jax.sharding.use_abstract_mesh(mesh_for(platform, make_mesh(MeshConfig(1, 1, 1)))):
        traced = jax.jit(attend_cache).trace(*shapes_of(program))
    assert mark in traced.lower(lowering_platforms=(platform,)).as_text()
    assert mark not in traced.lower(lowering_platforms=("cpu",)).as_text()


def check_on_device(platform: str) -> None:
    """Attention of a 1.5B model's heads on the device that this process computes on, bfloat16."""
    if jax.default_backend() != platform:
        pytest.skip(f"JAX sees no {platform} here")
    rng = np.random.default_rng(0)
    for number, rows in ((1, None), (100, rng.permutation(24)[:16].astype(np.int32))):
        _, keys, values, _ = arrays(16, 24, 2, 6, 128, 1024, "bfloat16")
        queries = jnp.asarray(rng.normal(size=(16, number, 12, 128)), jnp.bfloat16)
        first = rng.integers(0, 1024 - number, (16, 1), dtype=np.int32)
        rest = first + np.arange(number, dtype=np.int32)[None], rows
        got = jax.jit(attend_cache)(queries, (keys,), (values,), *rest)
        with jax.default_device(jax.devices("cpu")[0]):
            host = [jnp.asarray(np.asarray(x)) for x in (queries, keys, values)]
            wanted = jax.jit(attend_cache)(host[0], (host[1],), (host[2],), *rest)
        np.testing.assert_allclose(np.float32(got), np.float32(wanted), atol=0.02)


@pytest.mark.tpu
def test_on_a_tpu() -> None:
    check_on_device("tpu")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_device("gpu")
