"""Tests of each surrogate's value and gradient by hand. See test_policy.py for the clipped loss.

The KL to a teacher's likeliest tokens is also tested by finite differences and by limits.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded import raises_coded

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batch import NO_TOKEN, Batch, TeacherBatch, TopTokens
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.losses.policy import policy_loss
from lightning_jax.rl.losses.surrogates import (
    LEAST,
    MAX_GAP,
    LossInputs,
    cispo,
    clip,
    gspo,
    kl_to_top,
    reinforce,
    teacher_advantages,
)

LN = math.log


def row(*values: float) -> jax.Array:
    return jnp.asarray([values], jnp.float32)


def batch_of(*calls: int) -> Batch:
    nothing = jnp.zeros((1, len(calls)), jnp.float32)
    ints = jnp.zeros((1, len(calls)), jnp.int32)
    index = jnp.asarray([calls], jnp.int32)
    return Batch(ints, ints, ints, ints, ints, index >= 0, index, nothing, nothing, nothing)


def value_and_gradient(surrogate, log_ratio, advantages, batch):
    """Return (token losses, ratios, bounded) and the gradient of the summed losses.

    Log-probs are the log-ratios minus 1.
    """

    def total(log_ratio):
        found = surrogate(LossInputs(log_ratio - 1.0, log_ratio, advantages, batch))
        return found.token_loss.sum(), (found.token_loss, found.ratio, found.is_clipped)

    gradient, found = jax.grad(total, has_aux=True)(log_ratio)
    return *found, gradient


def test_gspo_by_hand():
    # Call 0 has ratios 1.44 and 1, with geometric mean 1.2. Call 1 has only 0.9.
    # A = 2: min(1.2 * 2, 1.3 * 2) = 2.4 at both; A = -1: min(-0.9, -0.9) = -0.9.
    # d s / d logp = s / tokens, so each of call 0's two terms has gradient -2 * 1.2 / 2 at each of
    # its two tokens. That sums to -2.4 per token.
    losses, ratio, bounded, gradient = value_and_gradient(
        gspo(0.2, 0.3), row(LN(1.44), 0.0, LN(0.9)), row(2, 2, -1), batch_of(0, 0, 1)
    )
    np.testing.assert_allclose(losses, [[-2.4, -2.4, 0.9]], atol=1e-6)
    np.testing.assert_allclose(ratio, [[1.2, 1.2, 0.9]], atol=1e-6)
    assert bounded.tolist() == [[False] * 3]
    np.testing.assert_allclose(gradient, [[-2.4, -2.4, 0.9]], atol=1e-6)


def test_gspo_bounds_a_call_as_a_whole():
    # The mean 1.2 of 1.44 and 1 is beyond 1.1, so no token has a gradient, not even the second.
    losses, _, bounded, gradient = value_and_gradient(
        gspo(0.1, 0.1), row(LN(1.44), 0.0), row(1, 1), batch_of(0, 0)
    )
    np.testing.assert_allclose(losses, [[-1.1, -1.1]], atol=1e-6)
    assert bounded.tolist() == [[True, True]]
    assert gradient.tolist() == [[0.0, 0.0]]


def test_dual_clip_ends_a_negative_advantage():
    # With A = -2 the loss is 2 * 2 at ratio 2, and 3 * 2 at ratio 4, without a gradient. With A = 2
    # it is -1.3 * 2.
    log_ratio, advantages = row(LN(2), LN(4), LN(4)), row(-2, -2, 2)
    inputs = log_ratio, advantages, batch_of(0, 1, 2)
    for surrogate in (clip, gspo):
        losses, _, bounded, gradient = value_and_gradient(surrogate(0.2, 0.3), *inputs)
        np.testing.assert_allclose(losses, [[4, 6, -2.6]], atol=1e-6)
        np.testing.assert_allclose(gradient, [[4, 0, 0]], atol=1e-6)
        assert bounded.tolist() == [[False, True, True]]
        losses, _, bounded, gradient = value_and_gradient(surrogate(0.2, 0.3, dual=0.0), *inputs)
        np.testing.assert_allclose(losses, [[4, 8, -2.6]], atol=1e-5)
        np.testing.assert_allclose(gradient, [[4, 8, 0]], atol=1e-5)
        assert bounded.tolist() == [[False, False, True]]


def test_no_gradient_grows_with_a_negative_advantage():
    log_ratio = row(*range(21))
    *_, gradient = value_and_gradient(
        clip(), log_ratio, -jnp.ones_like(log_ratio), batch_of(*range(21))
    )
    assert float(jnp.abs(gradient).max()) < 3.0


def test_gspo_gradient_against_finite_differences():
    rng = np.random.default_rng(0)
    log_ratio, advantages = rng.normal(size=6) * 0.3, np.asarray([1, 1, 1, -2, -2, 0.5])
    calls = [3, 3, 3, 5, 5, 8]

    def loss(x):  # float64 and plain Python
        total = 0.0
        for call in set(calls):
            members = [i for i, c in enumerate(calls) if c == call]
            s = math.exp(np.mean([x[i] for i in members]))
            for i in members:
                total -= min(s * advantages[i], min(max(s, 0.8), 1.3) * advantages[i])
        return total

    *_, gradient = value_and_gradient(
        gspo(0.2, 0.3), row(*log_ratio), row(*advantages), batch_of(*calls)
    )
    for i in range(6):
        step = np.eye(6)[i] * 1e-5
        slope = (loss(log_ratio + step) - loss(log_ratio - step)) / 2e-5
        assert gradient[0, i] == pytest.approx(slope, abs=1e-4)


def test_cispo_by_hand():
    # Ratios 1.5, 0.5, 1 bounded to 1.28, 0.5 (no lower bound), 1; log-probs are ln r - 1.
    # -1.28 * 1 * (0.4055 - 1) = 0.7610; -0.5 * -1 * (-0.6931 - 1) = -0.8466; -1 * 2 * -1 = 2
    # The gradient is -bounded * A, so no token loses it.
    losses, ratio, bounded, gradient = value_and_gradient(
        cispo(1.0, 0.28), row(LN(1.5), LN(0.5), 0.0), row(1, -1, 2), batch_of(0, 0, 0)
    )
    np.testing.assert_allclose(losses, [[0.761005, -0.846574, 2.0]], atol=1e-5)
    np.testing.assert_allclose(ratio, [[1.5, 0.5, 1.0]], atol=1e-6)
    assert bounded.tolist() == [[True, False, False]]
    np.testing.assert_allclose(gradient, [[-1.28, 0.5, -2.0]], atol=1e-6)


def test_reinforce_by_hand():
    losses, ratio, bounded, gradient = value_and_gradient(
        reinforce(), row(LN(1.5), 0.0), row(2, -1), batch_of(0, 0)
    )
    np.testing.assert_allclose(losses, [[-2 * (LN(1.5) - 1), -1.0]], atol=1e-6)
    np.testing.assert_allclose(ratio, [[1.5, 1.0]], atol=1e-6)
    assert bounded is False
    assert gradient.tolist() == [[-2.0, 1.0]]


# The KL to a teacher's likeliest tokens

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


def taught_batch(top: TopTokens | None = None) -> tuple[jax.Array, Batch]:
    """Return an array of ones, and a batch of two targets of which the first is trained."""
    ints, one = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2))
    mask = jnp.asarray([[True, False]])
    teacher = TeacherBatch(-1.5 * one, 4.0 * one, top)
    five = (ints, ints, ints, ints, ints)
    batch = Batch(*five, mask, ints, -one, 2.0 * one, 0.5 * one, teacher=teacher)
    return one, batch


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
    top = TopTokens(jnp.zeros((1, 2, 3), jnp.int32), jnp.zeros((1, 2, 3)), "forward")
    one, batch = taught_batch(top)
    loss, sums = policy_loss(-one, batch, AlgorithmConfig(), teacher_kl=0.75 * one)
    assert float(loss) == pytest.approx(0.5 * (-2.0 + 4.0 * 0.75))
    assert float(sums["train/distill_kl"]) == 0.75  # of one trained token
    with raises_coded(InvalidValue, "missing", "teacher_kl"):
        policy_loss(-one, batch, AlgorithmConfig())


def test_an_unknown_kl_is_refused():
    with raises_coded(InvalidValue, "unknown", "kl"):
        kl_to_top(jnp.zeros(2), jnp.zeros(2), "sideways")


# The advantages that a teacher gives to sampled tokens

POLICY_OF_3, TEACHER_OF_3 = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


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
    count, mask = len(POLICY_OF_3), jnp.ones((1, len(POLICY_OF_3)), bool)
    log_policy = jnp.log(jnp.asarray(POLICY_OF_3, jnp.float32))[None]
    zeros, calls = jnp.zeros((1, count)), jnp.arange(count, dtype=jnp.int32)[None]
    batch = Batch(
        *(calls, calls, calls, calls, calls),
        target_mask=mask,
        target_calls=calls,
        behavior_logprobs=log_policy,
        advantages=zeros,
        weights=jnp.asarray(POLICY_OF_3, jnp.float32)[None],
        teacher=TeacherBatch(jnp.log(jnp.asarray(TEACHER_OF_3, jnp.float32))[None], 3.0 + zeros),
    )
    algorithm = AlgorithmConfig(loss=loss)

    def sampled(logits: jax.Array) -> jax.Array:
        return policy_loss(jax.nn.log_softmax(logits)[None], batch, algorithm)[0]

    def reverse_kl(logits: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(logits)
        return (
            3.0 * (jnp.exp(log_p) * (log_p - jnp.log(jnp.asarray(TEACHER_OF_3, jnp.float32)))).sum()
        )

    expected = jax.grad(reverse_kl)(log_policy[0])
    np.testing.assert_allclose(jax.grad(sampled)(log_policy[0]), expected, atol=1e-6)
    # By hand: 3 * p * (log(p / q) - KL), with KL = 0.5 ln 2.5 + 0.3 ln 1.5 + 0.2 ln (1/3).
    gaps = np.log(POLICY_OF_3 / TEACHER_OF_3)
    by_hand = 3.0 * POLICY_OF_3 * (gaps - (POLICY_OF_3 * gaps).sum())
    np.testing.assert_allclose(expected, by_hand, atol=1e-6)


def test_advantages_of_teacher_and_rewards_add_up():
    one, batch = taught_batch()
    # ratio 1, so the loss is -0.5 * (2 + 4 * (-1.5 - -1)) = 0
    loss, _ = policy_loss(-one, batch, AlgorithmConfig())
    assert float(loss) == pytest.approx(0.0)
