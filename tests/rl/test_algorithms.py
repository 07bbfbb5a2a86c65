"""Tests of each named algorithm, from rewards to a loss worked by hand, and of their table.

The group has two rollouts with one call each. A earned 1 with one token of ratio 1.5. B earned 0
with three tokens of ratios 1, 0.5, 1. All tokens have log-probability -1 under the sampler and the
reference. So current log-probs are -0.594535 for A and -1, -1.693147, -1 for B. The critic's value
is 0.5 for the prompt, and 0.5, 0.25, 0 before the tokens of B.
"""

import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.rl import algorithms
from lightning_jax.rl.advantages import step_advantages
from lightning_jax.rl.batches.batching import make_batches, make_sequences
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.rl.credit import assign_credit
from lightning_jax.rl.dpo import weigh_pairs
from lightning_jax.rl.losses.policy import policy_loss
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.settings import load_config
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.train.config import Config

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"
RATIOS = {2: 1.5, 3: 1.0, 4: 0.5, 5: 1.0}  # by token id
STEP = [
    trajectory(transition([1], [2]), reward=1.0, rollout="A"),
    trajectory(transition([1], [3, 4, 5]), reward=0.0, rollout="B"),
]
VALUES = {
    "learned": [((0.5,),), ((0.5,),)],
    "learned_token": [((0.5,),), ((0.5, 0.25, 0.0),)],
}

# Advantages are +1 and -1 unless noted. Clipped to [0.8, 1.2]: A 1.2; B -1, -0.8, -1, sum -2.8.
LOSSES = {
    "grpo_by_rollout": -1.2 / 2 + 2.8 / 6,
    # k3 of the ratios: 1.5 is 2/3 - 1 + 0.405465 = 0.072132, 0.5 is 2 - 1 - 0.693147 = 0.306853
    "grpo": -1.2 / 2 + 2.8 / 6 + 0.04 * (0.072132 / 2 + 0.306853 / 6),
    "ppo_clip": -1.2 / 2 + 2.8 / 6,
    "dr_grpo": -(0.6 - 1.4) / (2 * 1024),  # A = +0.5 and -0.5
    "dapo": -(1.28 - 2.8) / 4,
    "gspo": -1.5 / 2 + 2.5 / 6,  # in a step's only update: the correction alone, at most 2
    # A 1.5 * -0.594535, because the bound is 5; B 1 * -1, 0.5 * -1.693147, 1 * -1
    "cispo": -(-0.891802 + 1 + 0.846574 + 1) / 4,
    "rloo": -(-0.594535 + 1 + 1.693147 + 1) / 2,
    "reinforce": 0.594535 / 2,  # A = 1 and 0
    # k1 to go: A 0.405465; B -0.693147, -0.693147, 0. Advantages lose a hundredth of it.
    "reinforce_plus_plus": -(1.2 * 0.99594535 - 0.99306853 - 0.8 * 0.99306853 - 1) / 4,
    # k2: 0.405465^2 / 2 = 0.082201 and 0.693147^2 / 2 = 0.240227
    "reinforce_plus_plus_baseline": (-1.2 + 2.8 + 0.01 * (0.082201 + 0.240227)) / 4,
    "decoupled_ppo": -1.5 / 2 + 2.5 / 6,  # the correction alone, at most 2
    # A 1 - 0.5; B from the end 0, -0.25, -0.25 - 0.95 * 0.25 = -0.4875; clipped 0.6, 0.4875, 0.2, 0
    "ppo": -(0.6 - 0.4875 - 0.2) / 4,
    "value_per_call": -0.6 / 2 + 1.4 / 6,  # A = 1 - 0.5 and 0 - 0.5
    "turn_groups": -1.2 / 2 + 2.8 / 6,  # there is only one turn
    "raft": 0.594535 / 2,  # A = 1 and 0
}


def test_the_table_is_that_of_the_code():
    text = DOCS.read_text()
    assert algorithms.table() in text, "paste lightning_jax.rl.algorithms.table() into the page"
    assert [function.__name__ for function in algorithms.ALGORITHMS] == [*LOSSES, "dpo"]


@pytest.mark.parametrize("function", algorithms.ALGORITHMS)
def test_the_settings_of_a_row_make_its_algorithm(function):
    settings = algorithms.changed_settings(function())
    assert f"`{function.__name__}()` | `{' '.join(settings)}` |" in DOCS.read_text() or not settings
    assert load_config(Config, [f"algorithm.{s}" for s in settings]).algorithm == function()


def test_an_override_wins():
    assert algorithms.dapo(clip_high=0.3) == replace(algorithms.dapo(), clip_high=0.3)
    assert algorithms.grpo_by_rollout(num_epochs=2) == AlgorithmConfig(num_epochs=2)


@pytest.mark.parametrize("name", LOSSES)
def test_each_algorithm_by_hand(name):
    algorithm = getattr(algorithms, name)()
    credit = assign_credit(STEP, algorithm, VALUES.get(algorithm.credit))
    advantages, _ = step_advantages(credit, algorithm)
    sequences = make_sequences(
        STEP,
        advantages,
        aggregation=algorithm.aggregation,
        token_divisor=algorithm.token_divisor,
    )
    batch, sampled, current = measured(sequences)
    batch.behavior_logprobs[:] = sampled
    batch = jax.tree.map(jnp.asarray, batch)
    reference = jnp.asarray(sampled) if algorithm.kl_coef else None
    loss, _ = policy_loss(jnp.asarray(current), batch, algorithm, ref_logprobs=reference)
    assert loss == pytest.approx(LOSSES[name], abs=2e-6)


def test_dpo_by_hand():
    algorithm = algorithms.dpo()
    sequences, _ = prepare_step(STEP, algorithm, policy_version=0)
    batch, sampled, current = measured(sequences)
    knobs = {"beta": algorithm.dpo_beta}
    (advantages,), metrics = weigh_pairs(sequences, [batch], [current], [sampled], **knobs)
    # A gained 0.405465 and B lost 0.693147: a margin of ln 3.
    assert metrics["train/loss"] == pytest.approx(math.log(1 + 3**-0.1), abs=2e-6)
    slope = 0.1 / (1 + 3**0.1)
    np.testing.assert_allclose(advantages, [[slope, -slope, -slope, -slope]], atol=1e-6)


def measured(sequences):
    """Return (batch, log-probs at sampling, current log-probs)."""
    (batch,), _ = make_batches(
        sequences, BatchConfig(rows=1, row_len=16, max_targets=4, head_chunk=4)
    )
    sampled = np.full((1, 4), -1.0, np.float32)
    ratios = [[RATIOS[token] for token in batch.target_ids[0].tolist()]]
    return batch, sampled, sampled + np.log(ratios).astype(np.float32)
