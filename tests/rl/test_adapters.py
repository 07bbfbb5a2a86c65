"""Tests of the joint update of several policies, stacked along the first axis of arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lightning_jax.rl.adapters import (
    AdapterPolicies,
    find_trained_policies,
    norms,
    select,
    vmap_optimizer,
)
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import BatchConfig
from lightning_jax.testing.records import sequence


def test_norms_and_choices_are_by_the_first_axis() -> None:
    tree = {"x": jnp.array([[3.0, 0.0], [0.0, 1.0]]), "y": jnp.array([4.0, 0.0])}
    np.testing.assert_allclose(norms(tree, 2), [5.0, 1.0])
    new, old = jax.tree.map(jnp.ones_like, tree), jax.tree.map(jnp.zeros_like, tree)
    found = select(jnp.array([False, True]), new | {"n": jnp.array(3)}, old | {"n": jnp.array(2)})
    np.testing.assert_array_equal(found["x"], [[0.0, 0.0], [1.0, 1.0]])
    assert found["n"] == 3


def test_each_entry_has_an_optimizer_of_its_own() -> None:
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_schedule(lambda n: n))
    optimizer = vmap_optimizer(clipped, 2)
    grads = {"x": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
    state = optimizer.init(grads)
    _, state = optimizer.update(grads, state, grads)
    updates, state = optimizer.update(grads, state, grads)
    # Only the first entry's norm exceeds 1. Each entry's schedule is at 1 in the second update.
    np.testing.assert_allclose(updates["x"], [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    assert state[1].count.tolist() == [2, 2]


@pytest.mark.parametrize(("separate", "expected"), [(True, [False, True]), (False, [True, True])])
def test_who_takes_part_in_an_update(separate: bool, expected: list[bool]) -> None:
    adapted = dataclasses.replace(sequence([1, 2], [3]), adapter=1)
    config = BatchConfig(rows=2, row_len=16, max_targets=8, head_chunk=8)
    batches, _ = make_batches([adapted], config)  # its second row is padding with adapter 0
    policies = AdapterPolicies(("a", "b"), (True, True), separate)
    assert find_trained_policies(policies, batches).tolist() == expected
    frozen = AdapterPolicies(("a", "b"), (True, False), separate)
    assert find_trained_policies(frozen, batches).tolist() == [expected[0], False]
