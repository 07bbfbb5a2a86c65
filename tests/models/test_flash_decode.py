"""The kernels of decoding, run by Pallas's interpreter, against attention with all scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from lightning_jax.config import MeshConfig
from lightning_jax.models import flash_decode
from lightning_jax.models.cache import _attend_rows, attend_cache
from lightning_jax.models.sharding import make_mesh
from lightning_jax.testing.platforms import mesh_for

KERNELS = {"tpu": flash_decode.attend_tpu, "cuda": flash_decode.attend_gpu}


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


def test_devices_of_a_mesh_take_heads() -> None:
    queries, keys, values, index = arrays(2, 3, 2, 2, 16, 128, "float32")
    mesh = make_mesh(MeshConfig(2, 2, 2))
    place = NamedSharding(mesh, jax.P(None, "tensor"))
    placed = [jax.device_put(each, place) for each in (queries, keys, values)]
    kernel = functools.partial(flash_decode.attend_tpu, interpret=True)
    split = jax.jit(functools.partial(flash_decode.per_device, kernel))
    got = split(*placed, jax.device_put(index, NamedSharding(mesh, jax.P())))
    assert got[2].sharding.is_equivalent_to(place, ndim=4)
    for ours, theirs in zip(got, jax.jit(kernel)(queries, keys, values, index), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(("platform", "mark"), [("tpu", "tpu_custom_call"), ("cuda", "triton")])
def test_a_step_lowers_without_the_device(platform, mark) -> None:
    """With the heads of a 1.5B model, bfloat16; two segments, of which the second is odd."""
    queries = jax.ShapeDtypeStruct((8, 1, 12, 128), jnp.bfloat16)
    spans = (512, 100)
    keys = tuple(jax.ShapeDtypeStruct((16, 2, 128, span), jnp.bfloat16) for span in spans)
    values = tuple(jax.ShapeDtypeStruct((16, 2, span, 128), jnp.bfloat16) for span in spans)
    positions = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh_for(platform, make_mesh(MeshConfig(1, 1, 1)))):
        traced = jax.jit(attend_cache).trace(queries, keys, values, positions)
    assert mark in traced.lower(lowering_platforms=(platform,)).as_text()
    assert mark not in traced.lower(lowering_platforms=("cpu",)).as_text()


def check_on_device(platform: str) -> None:
    """Attention of a 1.5B model's heads on the device that this process computes on, bfloat16."""
    if jax.default_backend() != platform:
        pytest.skip(f"JAX sees no {platform} here")
    queries, keys, values, index = arrays(16, 24, 2, 6, 128, 1024, "bfloat16")
    positions = jnp.maximum(index, 0)[:, None]
    flat = queries.reshape(16, 1, 12, 128) * 128**0.5
    got = attend_cache(flat, (keys,), (values,), positions)
    with jax.default_device(jax.devices("cpu")[0]):
        host = [jnp.asarray(np.asarray(x)) for x in (flat, keys, values, positions)]
        wanted = attend_cache(host[0], (host[1],), (host[2],), host[3])
    np.testing.assert_allclose(np.float32(got), np.float32(wanted), atol=0.02)


@pytest.mark.tpu
def test_on_a_tpu() -> None:
    check_on_device("tpu")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_device("gpu")
