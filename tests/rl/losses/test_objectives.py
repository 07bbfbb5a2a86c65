"""Tests that the metric names of a step are known before it runs."""

import jax
import jax.numpy as jnp
import optax
import pytest

from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.critic import Critic
from lightning_jax.rl.losses.objectives import metric_names, policy_objective, supervised_objective
from lightning_jax.testing.records import sequence

SHAPE = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_the_names_are_those_that_the_objective_reports(kl_coef: float):
    (batch,), _ = make_batches([sequence([1, 2], [3, 4], advantage=1.0)], SHAPE)
    batch = jax.tree.map(jnp.asarray, batch)
    zeros = jnp.zeros((1, 8))
    for objective in (policy_objective(kl_coef=kl_coef), supervised_objective()):
        _, sums = objective(zeros, zeros, batch, zeros if kl_coef else None)
        assert metric_names(objective, None, bool(kl_coef)) == sorted(sums)
    names = metric_names(policy_objective(kl_coef=kl_coef), None, bool(kl_coef))
    assert ("train/kl_to_reference" in names) is bool(kl_coef)


def test_a_critic_reports_its_own():
    alone = metric_names(policy_objective(), None, False)
    both = metric_names(policy_objective(), Critic(optax.sgd(1.0), clip=0.2), False)
    assert set(both) - set(alone) == {"train/value_loss", "train/value_clip_fraction"}
    assert set(alone) < set(both)
