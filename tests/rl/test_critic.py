import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.rl.batches.batch import StateBatch
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.critic import (
    ValueHead,
    init_critic,
    make_critic,
    scale_gradient,
    state_values,
    value_loss,
)


def row(*values: float) -> jax.Array:
    return jnp.asarray([values], jnp.float32)


def states(returns: jax.Array, weights: jax.Array, old: jax.Array) -> StateBatch:
    return StateBatch(jnp.zeros(returns.shape, jnp.int32), old, returns, weights)


def test_values_by_hand():
    nodes = jnp.asarray([[[1, 2, 3, 4], [0, 0, 0, 0], [-1, 1, 0, 2]]], jnp.float32)
    head = ValueHead(jnp.asarray([1, 0, 2, 1], jnp.float32), jnp.float32(0.5))
    # sqrt(4) = 2: (1 + 6 + 4) / 2 + 0.5 = 6; (-1 + 2) / 2 + 0.5 = 1
    values = state_values(head, nodes, jnp.asarray([[2, 0, 1, 0]]))
    assert values.tolist() == [[1.0, 6.0, 0.5, 6.0]]
    half = state_values(head, nodes.astype(jnp.bfloat16), jnp.asarray([[0]]))
    assert (half.tolist(), half.dtype) == ([[6.0]], jnp.float32)


def test_a_new_head_says_0_of_every_state():
    critic = make_critic(AlgorithmConfig(credit="learned"))
    assert critic is not None
    made = init_critic(critic, 4)
    nodes = jax.random.normal(jax.random.key(0), (1, 3, 4))
    assert not state_values(made.head, nodes, jnp.asarray([[0, 1, 2]])).any()
    assert make_critic(AlgorithmConfig()) is None


def test_value_loss_by_hand():
    values, returns, weights = row(1.0, 2.0, 7.0), row(0.0, 4.0, -9.0), row(0.5, 0.25, 0.0)
    # (0.5 * 1 + 0.25 * 4) / 2, because an entry of weight 0 is padding
    loss, metrics = value_loss(values, states(returns, weights, row(0, 0, 0)), clip=0.0)
    assert loss == metrics["train/value_loss"] == 0.75
    assert list(metrics) == ["train/value_loss"]


def test_a_value_that_moved_too_far_has_no_gradient():
    """Check values clipped to 0.5 +- 0.2.

    The first moved too far toward its return and the second too far away. The third stays near.
    """
    values, old = row(0.9, 0.1, 0.6), row(0.5, 0.5, 0.5)
    targets = states(row(1.0, 1.0, 1.0), row(1.0, 1.0, 1.0), old)

    def loss_fn(values):
        return value_loss(values, targets, clip=0.2)

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(values)
    # errors: 0.3^2 of the clipped value, 0.9^2 of the unclipped value, 0.4^2
    assert loss == pytest.approx((0.09 + 0.81 + 0.16) / 2)
    np.testing.assert_allclose(grads, row(0.0, -0.9, -0.4), atol=1e-6)
    assert metrics["train/value_clip_fraction"] == 1.0


@pytest.mark.parametrize("factor", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_scaled_gradient(factor, dtype):
    x = jnp.asarray([[[1.0, -2.0]]], dtype)
    value, grad = jax.value_and_grad(lambda x: (scale_gradient(x, factor) ** 2).sum())(x)
    assert value == 5.0
    np.testing.assert_array_equal(grad, np.asarray(2 * factor * x))
