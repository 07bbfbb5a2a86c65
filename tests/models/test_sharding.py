"""One device and eight simulated ones compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.config import MeshConfig
from lightning_jax.models.sharding import (
    batch_sharding,
    cache_sharding,
    make_mesh,
    param_shardings,
)
from lightning_jax.models.transformer import forward, init_cache, unembed
from lightning_jax.testing.tiny import tiny_model


def _loss(params, config, tokens, positions, ends, remat):
    hidden, _ = forward(params, config, tokens, positions, ends=ends, remat=remat)
    logits = unembed(params, config, hidden)
    targets = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), config.vocab_size)
    return -(jax.nn.log_softmax(logits) * targets).sum(axis=-1).mean()


@pytest.mark.parametrize(("sizes", "remat"), [((2, 2, 2), False), ((1, 4, 2), True)])
def test_loss_and_gradient_agree_on_one_and_eight_devices(sizes, remat):
    model = tiny_model()
    tokens = jax.random.randint(jax.random.key(1), (8, 160), 0, 259)
    positions = jnp.broadcast_to(jnp.arange(160), (8, 160))
    ends = jnp.where(positions < 90, 90, 160)
    mesh = make_mesh(MeshConfig(*sizes))
    params = jax.device_put(model.params, param_shardings(model.config, mesh))
    rows = jax.device_put((tokens, positions, ends), batch_sharding(mesh))
    step = jax.jit(jax.value_and_grad(_loss), static_argnums=(1, 5))
    loss, grads = step(model.params, model.config, tokens, positions, ends, remat)
    sharded_loss, sharded = step(params, model.config, *rows, remat)
    assert len(sharded["layers_0"]["q"]["kernel"].sharding.device_set) == 8
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-6)


def test_decode_agrees_on_one_and_eight_devices():
    model = tiny_model()
    config = model.config
    mesh = make_mesh(MeshConfig(1, 4, 2))
    cache = init_cache(config, 3, 32)
    tokens = jnp.array([[5], [6], [7]])
    positions = jnp.array([[0], [0], [32]])
    step = jax.jit(forward, static_argnums=1)
    hidden, _ = step(model.params, config, tokens, positions, cache=cache)
    params = jax.device_put(model.params, param_shardings(config, mesh))
    cache = jax.device_put(cache, cache_sharding(config, mesh))
    sharded, cache = step(params, config, tokens, positions, cache=cache)
    np.testing.assert_allclose(sharded[:2], hidden[:2], atol=1e-5)
    assert np.abs(cache.keys[0][0][0, :, :, 0]).min() > 0
    assert not np.any(cache.keys[0][0][2])  # position 32 of a cache of 32 is padding


def test_an_axis_that_does_not_divide_stays_whole():
    mesh = make_mesh(MeshConfig(1, 1, 8))
    places = param_shardings(tiny_model().config, mesh)
    assert places["embed"]["embedding"].spec == jax.P(None, ("fsdp",))  # 259 tokens, 8 devices
    assert places["layers_0"]["k"]["kernel"].spec == jax.P(("fsdp",), None)  # 2 heads
    assert places["layers_0"]["up"]["kernel"].spec == jax.P(("fsdp",), ("tensor",))


def test_minus_one_takes_what_is_left_and_wrong_sizes_are_refused():
    assert dict(make_mesh(MeshConfig(2, -1, 2)).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert make_mesh(MeshConfig(), jax.devices()[:1]).size == 1
    with pytest.raises(ValueError, match="does not fit 8 devices; expected sizes whose"):
        make_mesh(MeshConfig(3, -1, 1))
    with pytest.raises(ValueError, match="one of them may be -1"):
        make_mesh(MeshConfig(-1, -1, 1))
