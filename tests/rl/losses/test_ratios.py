import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded import raises_coded

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.losses import ratios as module
from lightning_jax.rl.losses.ratios import kl_estimate, level_log_ratio, mask, truncate

call_sums, call_means, sums_to_go = map(
    jax.jit, (module.call_sums, module.call_means, module.sums_to_go)
)
CALLS = jnp.asarray([[4, 4, 4, 7, 7, -1]], jnp.int32)
VALUES = jnp.asarray([[1, 2, 3, 4, 5, 0]], jnp.float32)


def row(*values: float) -> jax.Array:
    return jnp.asarray([values], jnp.float32)


def batch_of(calls: list[int]) -> Batch:
    """Build a batch with only call indices, where -1 is padding."""
    nothing = jnp.zeros((1, len(calls)), jnp.float32)
    ints = jnp.zeros((1, len(calls)), jnp.int32)
    index = jnp.asarray([calls], jnp.int32)
    return Batch(ints, ints, ints, ints, ints, index >= 0, index, nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # x = log q - log p = ln 2: -0.6931; 0.6931^2 / 2 = 0.2402; 2 - 1 - 0.6931 = 0.3069
    [("k1", -0.693147), ("k2", 0.240227), ("k3", 0.306853)],
)
def test_kl_estimates_by_hand(estimator, expected):
    assert kl_estimate(row(math.log(2)), estimator)[0, 0] == pytest.approx(expected, abs=1e-6)
    assert kl_estimate(row(0.0), estimator)[0, 0] == 0.0


def test_k3_is_bounded():
    # At x = 2, k3 is e^2 - 1 - 2 = 4.389056 with gradient e^2 - 1. At 3 it would be 16.1.
    def k3(x):
        return kl_estimate(row(x), "k3")[0, 0]

    assert k3(2.0) == pytest.approx(4.389056, abs=1e-5)
    assert jax.grad(k3)(2.0) == pytest.approx(6.389056, abs=1e-5)
    for far in (3.0, 19.0, 30.0):
        assert (k3(far), jax.grad(k3)(far)) == (10.0, 0.0)
    assert k3(-30.0) == 10.0 and jax.grad(k3)(-9.0) == pytest.approx(-1.0, abs=1e-3)


def test_k1_and_k3_average_to_the_kl():
    # Samples of p = (0.7, 0.3) against q = (0.4, 0.6), weighted by p.
    p, q = np.asarray([0.7, 0.3]), np.asarray([0.4, 0.6])
    exact = float((p * np.log(p / q)).sum())
    for estimator in ("k1", "k3"):
        values = np.asarray(kl_estimate(row(*np.log(q / p)), estimator)[0])
        assert (p * values).sum() == pytest.approx(exact, abs=1e-6)


def test_levels_by_hand():
    log_ratio, batch = row(0.1, 0.3, -0.5, 0.0), batch_of([0, 0, 1, -1])
    expected = {
        "token": [0.1, 0.3, -0.5, 0.0],
        "sequence": [0.4, 0.4, -0.5, 0.0],
        "sequence_mean": [0.2, 0.2, -0.5, 0.0],
    }
    for level, values in expected.items():
        np.testing.assert_allclose(level_log_ratio(log_ratio, batch, level)[0], values, atol=1e-6)


def test_truncation_by_hand():
    assert truncate(2.0)(row(0.25, 1.0, 3.0)).tolist() == [[0.25, 1.0, 2.0]]


def test_masking_by_hand():
    assert mask(0.5, 2.0)(row(0.25, 0.5, 2.0, 3.0)).tolist() == [[0.0, 0.5, 2.0, 0.0]]


def test_unknown_names_are_refused():
    with raises_coded(InvalidValue, "unknown", "estimator"):
        kl_estimate(row(0.0), "k4")
    with raises_coded(InvalidValue, "unknown", "level"):
        level_log_ratio(row(0.0), batch_of([0]), "word")


def test_sums_by_hand():
    assert call_sums(VALUES, CALLS).tolist() == [[6, 6, 6, 9, 9, 0]]
    assert sums_to_go(VALUES, CALLS).tolist() == [[6, 5, 3, 9, 5, 0]]
    means = call_means(VALUES, CALLS, CALLS >= 0)
    assert means.tolist() == [[2, 2, 2, 4.5, 4.5, 0]]


def test_rows_are_apart_and_one_call_may_fill_a_row():
    calls = jnp.asarray([[0, 0], [0, 1]], jnp.int32)
    values = jnp.asarray([[1, 2], [3, 4]], jnp.float32)
    assert call_sums(values, calls).tolist() == [[3, 3], [3, 4]]
    assert sums_to_go(values, calls).tolist() == [[3, 2], [3, 4]]


def test_random_rows_against_plain_sums():
    rng = np.random.default_rng(0)
    calls = np.sort(rng.integers(0, 5, (3, 16)), axis=1).astype(np.int32)
    values = rng.normal(size=(3, 16)).astype(np.float32)
    sums, to_go = np.zeros_like(values), np.zeros_like(values)
    for b, i in np.ndindex(3, 16):
        same = calls[b] == calls[b, i]
        sums[b, i] = values[b][same].sum()
        to_go[b, i] = values[b][same & (np.arange(16) >= i)].sum()
    given = jnp.asarray(values), jnp.asarray(calls)
    np.testing.assert_allclose(call_sums(*given), sums, atol=1e-5)
    np.testing.assert_allclose(sums_to_go(*given), to_go, atol=1e-5)


def test_the_gradient_of_a_call_sum_reaches_each_of_its_targets():
    # The gradient of call 4's sum at its first target is 1 at each target of call 4.
    gradient = jax.grad(lambda v: call_sums(v, CALLS)[0, 0])(VALUES)
    assert gradient.tolist() == [[1, 1, 1, 0, 0, 0]]
