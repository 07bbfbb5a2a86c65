"""Tests of the KL to a teacher's likeliest tokens, by hand, by finite differences and by limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded import raises_coded

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batch import NO_TOKEN, Batch, TeacherBatch, TopTokens
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.losses.policy import policy_loss
from lightning_jax.rl.losses.surrogates import LEAST, kl_to_top

TEACHER = np.array([0.5, 0.25, 0.05, 0.15, 0.05])
POLICY = np.array([0.1, 0.2, 0.4, 0.1, 0.2])
TOP = [0, 1, 3]  # the teacher's three likeliest of five tokens


def kl_of(logits: jax.Array, kl: str, top: list[int] | None = None) -> jax.Array:
    """Return the KL of a policy with these logits to `TEACHER`'s tokens `top`."""
    ids = TOP if top is None else top
    log_p = jax.nn.log_softmax(logits)[jnp.asarray(ids)]
    return kl_to_top(log_p, jnp.asarray(np.log(TEACHER[ids]), jnp.float32), kl)


def coarse(values: np.ndarray) -> np.ndarray:
    """Return the probabilities of the named tokens and of all others together."""
    return np.append(values[TOP], 1 - values[TOP].sum())


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_kl_by_hand_with_the_rest_as_one_outcome(kl: str):
    p, q = coarse(POLICY), coarse(TEACHER)
    expected = divergence(q, p) if kl == "forward" else divergence(p, q)
    found = kl_of(jnp.log(jnp.asarray(POLICY, jnp.float32)), kl)
    assert float(found) == pytest.approx(expected, rel=1e-5)
    # All others as one outcome: never more than over the vocabulary.
    whole = divergence(TEACHER, POLICY) if kl == "forward" else divergence(POLICY, TEACHER)
    assert 0.0 < expected < whole


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_kl_over_the_whole_vocabulary_is_exact(kl: str):
    found = kl_of(jnp.log(jnp.asarray(POLICY, jnp.float32)), kl, [0, 1, 2, 3, 4])
    whole = divergence(TEACHER, POLICY) if kl == "forward" else divergence(POLICY, TEACHER)
    assert float(found) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_gradient_is_that_of_finite_differences(kl: str):
    logits = np.log(POLICY)

    def reference(logits: np.ndarray) -> float:
        p, q = coarse(np.exp(logits) / np.exp(logits).sum()), coarse(TEACHER)
        return divergence(q, p) if kl == "forward" else divergence(p, q)

    step = 1e-5
    differences = [
        (reference(logits + step * unit) - reference(logits - step * unit)) / (2 * step)
        for unit in np.eye(5)
    ]
    found = jax.grad(kl_of)(jnp.asarray(logits, jnp.float32), kl)
    np.testing.assert_allclose(found, differences, atol=1e-6)
    if kl == "forward":  # by hand: p - q at the named tokens
        np.testing.assert_allclose(found[jnp.asarray(TOP)], (POLICY - TEACHER)[TOP], atol=1e-6)


def test_forward_teaches_what_the_policy_never_samples_and_reverse_hardly():
    logits = jnp.asarray([-20.0, 0.0, 0.0, 0.0, 0.0])  # the teacher's best has 5e-10
    forward, reverse = (-float(jax.grad(kl_of)(logits, kl)[0]) for kl in ("forward", "reverse"))
    assert forward == pytest.approx(0.5, abs=1e-5)  # its probability under the teacher
    assert 0.0 < reverse < 1e-7


def test_a_coefficient_of_1_pulls_like_an_advantage_of_1_on_the_teachers_samples():
    """The expected gradient of REINFORCE over the teacher's own samples is that of the KL."""
    logits = jnp.log(jnp.asarray(POLICY, jnp.float32))
    everything = list(range(5))

    def sampled(logits: jax.Array) -> jax.Array:
        return -(jnp.asarray(TEACHER, jnp.float32) * jax.nn.log_softmax(logits)).sum()

    pulled = jax.grad(kl_of)(logits, "forward", everything)
    np.testing.assert_allclose(pulled, jax.grad(sampled)(logits), atol=1e-6)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_missing_tokens_certain_teachers_and_equal_policies_are_finite(kl: str):
    log_p = jnp.log(jnp.asarray([[0.3, 0.2], [0.3, 0.2], [0.5, 0.5]], jnp.float32))
    named = jnp.asarray([[0.0, NO_TOKEN], [NO_TOKEN, NO_TOKEN], [-0.6931472, -0.6931472]])
    found, slope = jax.value_and_grad(lambda x: kl_to_top(x, named, kl).sum())(log_p)
    assert jnp.isfinite(found) and jnp.isfinite(slope).all()
    by_row = kl_to_top(log_p, named, kl)
    np.testing.assert_allclose(by_row[1:], 0.0, atol=1e-6)  # nothing named, and no difference
    certain = -np.log(0.3) if kl == "forward" else 0.3 * np.log(0.3) + 0.7 * np.log(0.7 / LEAST)
    assert float(by_row[0]) == pytest.approx(certain, rel=1e-4)
    assert not slope[1].any()
    far = jnp.asarray([[-80.0, -0.1]])
    assert jnp.isfinite(jax.grad(lambda x: kl_to_top(x, named[:1], kl).sum())(far)).all()


def test_loss_adds_the_kl_with_its_coefficient_and_no_advantage():
    ints, one = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2))
    top = TopTokens(jnp.zeros((1, 2, 3), jnp.int32), jnp.zeros((1, 2, 3)), "forward")
    batch = Batch(
        *(ints, ints, ints, ints, ints),
        target_mask=jnp.asarray([[True, False]]),
        target_calls=ints,
        behavior_logprobs=-one,
        advantages=2.0 * one,
        weights=0.5 * one,
        teacher=TeacherBatch(-1.5 * one, 4.0 * one, top),
    )
    loss, sums = policy_loss(-one, batch, AlgorithmConfig(), teacher_kl=0.75 * one)
    assert float(loss) == pytest.approx(0.5 * (-2.0 + 4.0 * 0.75))
    assert float(sums["train/distill_kl"]) == 0.75  # of one trained token
    with raises_coded(InvalidValue, "missing", "teacher_kl"):
        policy_loss(-one, batch, AlgorithmConfig())


def test_an_unknown_kl_is_refused():
    with raises_coded(InvalidValue, "unknown", "kl"):
        kl_to_top(jnp.zeros(2), jnp.zeros(2), "sideways")
