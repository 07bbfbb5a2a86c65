import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.rl.losses import mean_metrics, policy_loss, supervised_loss
from lightning_jax.types import Batch

clipped_loss = functools.partial(policy_loss, clip_low=0.2, clip_high=0.3)


def one_row(behavior, advantages, weights, mask=None) -> Batch:
    """A batch of one row; only what the losses read is filled in."""
    mask = [True] * len(behavior) if mask is None else mask
    empty = jnp.zeros((1, len(behavior)), jnp.int32)
    as_row = [jnp.asarray([values], jnp.float32) for values in (behavior, advantages, weights)]
    return Batch(empty, empty, empty, empty, empty, jnp.asarray([mask]), *as_row)


def row(*values: float) -> jax.Array:
    return jnp.asarray([values], jnp.float32)


def test_policy_loss_by_hand():
    # ratios e^{logp - behavior}: 1, 1.5, 0.5, 0.5; advantages 1, 1, 1, -1; clip to [0.8, 1.3]
    # min(r A, clip(r) A): 1, 1.3 (clipped), 0.5 (not clipped: it may rise), -0.8 (clipped)
    # loss = -(0.1 * 1 + 0.2 * 1.3 + 0.3 * 0.5 - 0.4 * 0.8) = -0.19
    behavior = [-1.0, -2.0, -1.0, -1.0]
    logprobs = row(*(b + math.log(r) for b, r in zip(behavior, (1, 1.5, 0.5, 0.5), strict=True)))
    batch = one_row(behavior, [1, 1, 1, -1], [0.1, 0.2, 0.3, 0.4])
    loss, sums = clipped_loss(logprobs, batch)
    assert loss == pytest.approx(-0.19, abs=1e-6)
    metrics = mean_metrics({name: float(value) for name, value in sums.items()})
    assert metrics["train/loss"] == pytest.approx(-0.19, abs=1e-6)
    assert metrics["train/num_tokens"] == 4.0
    assert metrics["train/clip_fraction"] == 0.5
    # k3 = r - 1 - ln r: 0, 0.5 - ln 1.5 = 0.0945, twice -0.5 + ln 2 = 0.1931; mean 0.1202
    assert metrics["train/mismatch_kl"] == pytest.approx(0.120206, abs=1e-5)


def test_kl_to_the_reference_by_hand():
    # ref - logp = ln 2: k3 = 2 - 1 - ln 2 = 0.306853; loss = 0.5 * (-1 + 0.1 * 0.306853)
    batch = one_row([-1.0], [1.0], [0.5])
    loss, sums = clipped_loss(row(-1.0), batch, kl_coef=0.1, ref_logprobs=row(-1.0 + math.log(2)))
    assert loss == pytest.approx(-0.5 + 0.05 * 0.306853, abs=1e-6)
    assert sums["train/kl_to_reference"] == pytest.approx(0.306853, abs=1e-6)


def test_kl_without_reference_is_refused():
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1 without ref_logprobs"):
        clipped_loss(row(-1.0), one_row([-1.0], [1.0], [1.0]), kl_coef=0.1)


def test_gradient_on_policy_is_weighted_advantage_and_clipped_tokens_have_none():
    behavior = [-1.0, -1.0, -1.0, -1.0]
    batch = one_row(behavior, [2.0, -3.0, 1.0, -1.0], [0.1, 0.2, 0.3, 0.4])
    logprobs = row(-1.0, -1.0, -1.0 + math.log(1.5), -1.0 + math.log(0.5))
    gradient = jax.grad(lambda x: clipped_loss(x, batch)[0])(logprobs)
    np.testing.assert_allclose(gradient[0], [-0.2, 0.6, 0.0, 0.0], atol=1e-6)


def test_supervised_loss_by_hand():
    # 0.25 * 1 + 0.5 * 2 = 1.25; the masked token does not count
    batch = one_row([0, 0, 0], [1, 1, 1], [0.25, 0.5, 9.0], mask=[True, True, False])
    loss, sums = supervised_loss(row(-1.0, -2.0, -7.0), batch, entropy=row(1.0, 2.0, 9.0))
    assert loss == 1.25
    metrics = mean_metrics({name: float(value) for name, value in sums.items()})
    assert metrics == {
        "train/loss": 1.25,
        "train/num_tokens": 2.0,
        "train/nll": 1.5,
        "train/entropy": 1.5,
    }


def test_masked_values_change_neither_loss_nor_gradient():
    def value(padding: float):
        batch = one_row([-1.0, padding], [1.0, 0.0], [0.5, 0.0], mask=[True, False])
        objective = lambda x: clipped_loss(  # noqa: E731
            x, batch, kl_coef=0.1, ref_logprobs=row(-1.5, padding), entropy=x
        )
        return jax.value_and_grad(objective, has_aux=True)(row(-1.2, padding))

    (clean_loss, clean_sums), clean_gradient = value(0.0)
    for padding in (float("nan"), float("inf"), -1e30):
        (loss, sums), gradient = value(padding)
        assert loss == clean_loss
        assert sums == clean_sums
        np.testing.assert_array_equal(gradient, clean_gradient)


def test_rows_and_order_only_add_up():
    rng = np.random.default_rng(0)
    behavior, advantages, weights, current = rng.normal(size=(4, 6))
    whole = one_row(behavior, advantages, weights)
    order = rng.permutation(6)
    mixed = jax.tree.map(lambda leaf: leaf[:, order].reshape(2, 3), whole)
    logprobs = row(*current)
    expected, sums = clipped_loss(logprobs, whole)
    loss, mixed_sums = clipped_loss(logprobs[:, order].reshape(2, 3), mixed)
    assert loss == pytest.approx(float(expected), abs=1e-5)
    assert mixed_sums["train/clip_fraction"] == sums["train/clip_fraction"]


def test_nothing_selected_gives_zeros():
    batch = one_row([-1.0], [1.0], [1.0], mask=[False])
    loss, sums = clipped_loss(row(-3.0), batch)
    assert loss == 0.0
    assert set(mean_metrics({name: float(v) for name, v in sums.items()}).values()) == {0.0}


def test_a_hopeless_token_stays_finite():
    # exp(200) is infinite in float32
    batch = dataclasses.replace(one_row([-200.0], [-1.0], [1.0]))
    loss, gradient = jax.value_and_grad(lambda x: clipped_loss(x, batch)[0])(row(0.0))
    assert np.isfinite(loss)
    assert gradient == 0.0


def test_mismatch_kl_is_not_rounding_noise_near_zero():
    # k3(1e-4) = 5e-9; exp(x) - 1 - x in float32 would be off by 1e-7
    _, sums = clipped_loss(row(-1e-4), one_row([0.0], [1.0], [1.0]))
    assert sums["train/mismatch_kl"] == pytest.approx(5e-9, rel=1e-2)
