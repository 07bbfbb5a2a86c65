from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lightning_jax.rl.config import OptimizerConfig
from lightning_jax.rl.update.train_state import make_optimizer, make_schedule

STRICT_PROMOTION = False  # optax mixes dtypes


def rates(count: int, **settings) -> list[float]:
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, **settings))
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(count))).tolist()


def test_warm_up_rises_from_above_zero_to_the_full_rate():
    np.testing.assert_allclose(rates(5, warmup_steps=3), [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates(3, warmup_steps=1), [0.5, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates(2), [1.0, 1.0])


def test_cosine_falls_to_a_tenth_and_stays():
    # Half-way, a cosine from 1 to 0.1 is at 0.55.
    got = rates(8, warmup_steps=1, decay_steps=4)
    assert got[0] == pytest.approx(0.5)
    assert got[1] == pytest.approx(1.0)
    assert got[3] == pytest.approx(0.55)
    np.testing.assert_allclose(got[5:], 0.1, rtol=1e-6)


def test_first_update_by_hand():
    # Adam's first step is lr * sign(g) for any clip. The matrix also decays by lr * 0.1 * w.
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1)
    optimizer = make_optimizer(config)
    params = {"matrix": jnp.full((1, 1), 2.0), "bias": jnp.full((1,), 2.0)}
    grads = {"matrix": jnp.full((1, 1), 30.0), "bias": jnp.full((1,), -40.0)}
    updates: Any = jax.jit(optimizer.update)(grads, optimizer.init(params), params)[0]
    np.testing.assert_allclose(updates["matrix"], -0.01 - 0.01 * 0.1 * 2.0, rtol=1e-5)
    np.testing.assert_allclose(updates["bias"], 0.01, rtol=1e-5)


def test_first_moments_may_be_bfloat16():
    """Check that the error is below 1 % of an update, and that second moments stay float32."""
    params = {"matrix": jnp.full((2, 2), 2.0)}
    weights = {}
    for dtype in ("float32", "bfloat16"):
        optimizer: Any = make_optimizer(OptimizerConfig(learning_rate=0.01, mu_dtype=dtype))
        state: Any = optimizer.init(params)
        moved: Any = params
        for step in range(5):
            grads: Any = {"matrix": jnp.full((2, 2), 0.3) + 0.1 * step}
            updates, state = optimizer.update(grads, state, moved)
            moved = optax.apply_updates(moved, updates)
        adam = state[1][0]
        assert (adam.mu["matrix"].dtype, adam.nu["matrix"].dtype) == (dtype, "float32")
        weights[dtype] = np.asarray(moved["matrix"])
    np.testing.assert_allclose(weights["bfloat16"], weights["float32"], atol=1e-4)
    assert not np.array_equal(weights["bfloat16"], weights["float32"])
