"""Tests of each surrogate's value and gradient by hand. See test_policy.py for the clipped loss."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.losses.surrogates import LossInputs, cispo, clip, gspo, reinforce

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
