import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.rl.losses import segments as module

call_sums, call_means, sums_to_go = map(
    jax.jit, (module.call_sums, module.call_means, module.sums_to_go)
)
CALLS = jnp.asarray([[4, 4, 4, 7, 7, -1]], jnp.int32)
VALUES = jnp.asarray([[1, 2, 3, 4, 5, 0]], jnp.float32)


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
