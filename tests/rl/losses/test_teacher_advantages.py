"""Tests of the advantages that a teacher gives to sampled tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.rl.batches.batch import Batch, TeacherBatch
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.losses.policy import policy_loss
from lightning_jax.rl.losses.surrogates import MAX_GAP, teacher_advantages

POLICY, TEACHER = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


def test_advantage_by_hand():
    logprobs = jnp.asarray([[-1.0, -2.0, -0.5, -0.5]])
    teacher = TeacherBatch(
        logprobs=jnp.asarray([[-0.25, -4.0, -99.0, -99.0]]),
        coefs=jnp.asarray([[2.0, 0.5, 1.0, 0.0]]),
    )
    expected = [[2 * 0.75, 0.5 * -2.0, -MAX_GAP, 0.0]]
    np.testing.assert_allclose(teacher_advantages(logprobs, teacher), expected, rtol=1e-6)
    slope = jax.grad(lambda logprobs: teacher_advantages(logprobs, teacher).sum())(logprobs)
    assert not np.any(slope)


@pytest.mark.parametrize("loss", ["clip", "reinforce", "cispo", "gspo"])
def test_expected_gradient_is_that_of_the_reverse_kl(loss: str):
    """Add up the gradients of all tokens that the policy may sample, each with its probability."""
    count, mask = len(POLICY), jnp.ones((1, len(POLICY)), bool)
    log_policy = jnp.log(jnp.asarray(POLICY, jnp.float32))[None]
    zeros, calls = jnp.zeros((1, count)), jnp.arange(count, dtype=jnp.int32)[None]
    batch = Batch(
        *(calls, calls, calls, calls, calls),
        target_mask=mask,
        target_calls=calls,
        behavior_logprobs=log_policy,
        advantages=zeros,
        weights=jnp.asarray(POLICY, jnp.float32)[None],
        teacher=TeacherBatch(jnp.log(jnp.asarray(TEACHER, jnp.float32))[None], 3.0 + zeros),
    )
    algorithm = AlgorithmConfig(loss=loss)

    def sampled(logits: jax.Array) -> jax.Array:
        return policy_loss(jax.nn.log_softmax(logits)[None], batch, algorithm)[0]

    def reverse_kl(logits: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(logits)
        return 3.0 * (jnp.exp(log_p) * (log_p - jnp.log(jnp.asarray(TEACHER, jnp.float32)))).sum()

    expected = jax.grad(reverse_kl)(log_policy[0])
    np.testing.assert_allclose(jax.grad(sampled)(log_policy[0]), expected, atol=1e-6)
    # By hand: 3 * p * (log(p / q) - KL), with KL = 0.5 ln 2.5 + 0.3 ln 1.5 + 0.2 ln (1/3).
    gaps = np.log(POLICY / TEACHER)
    by_hand = 3.0 * POLICY * (gaps - (POLICY * gaps).sum())
    np.testing.assert_allclose(expected, by_hand, atol=1e-6)


def test_advantages_of_teacher_and_rewards_add_up():
    one = jnp.ones((1, 1))
    ints = jnp.zeros((1, 1), jnp.int32)
    batch = Batch(
        *(ints, ints, ints, ints, ints),
        target_mask=jnp.ones((1, 1), bool),
        target_calls=ints,
        behavior_logprobs=-one,
        advantages=2.0 * one,
        weights=0.5 * one,
        teacher=TeacherBatch(-1.5 * one, 4.0 * one),
    )
    # ratio 1, so the loss is -0.5 * (2 + 4 * (-1.5 - -1)) = 0
    loss, _ = policy_loss(-one, batch, AlgorithmConfig())
    assert float(loss) == pytest.approx(0.0)
