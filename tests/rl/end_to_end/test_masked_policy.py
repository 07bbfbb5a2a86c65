"""Tests by enumeration of the gradient of a policy that a grammar masks.

A response has two letters out of three and an end, which the grammar forces. There are 4 states and
9 responses. The logits are a table with a row for each state, so that the true gradient of the
expected reward is known: q(s) q(a | s) (Q(s, a) - V(s)) for allowed tokens, and 0 for others.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.engine.grammar.compiler import GrammarCompiler
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.batches.masks import mask_metrics, with_masks
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.rl.losses.policy import policy_loss
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.rl.update.logprobs import Head, score_nodes
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.testing.tiny import tiny_model

MODEL = tiny_model(num_layers=1)
CONFIG = MODEL.config.with_shape(tie_embeddings=False)
COMPILER = GrammarCompiler(MODEL.tokenizer, CONFIG.shape.vocab_size)
LETTERS = tuple(MODEL.tokenizer.encode("abc", special=False))
END = min(MODEL.tokenizer.eos_ids)
GRAMMAR = 'start: ("a" | "b" | "c") ("a" | "b" | "c")'
STATES = ((), *((letter,) for letter in LETTERS))
RESPONSES = tuple(itertools.product(LETTERS, repeat=2))
REWARDS = dict(zip(RESPONSES, np.random.default_rng(0).normal(size=9), strict=True))
SHAPE = BatchConfig(rows=2, row_len=16, max_targets=16, head_chunk=4)
REINFORCE = AlgorithmConfig(baseline="none", normalize="none", aggregation="constant")


def logit_table(lost: float) -> np.ndarray:
    """Return random logits [4, V] of which the grammar takes this share of the mass."""
    table = np.random.default_rng(1).normal(size=(4, CONFIG.shape.vocab_size))
    weights = np.exp(table)
    allowed = weights[:, LETTERS].sum(axis=1)
    wanted = (weights.sum(axis=1) - allowed) * (1 - lost) / lost
    table[:, LETTERS] += np.log(wanted / allowed)[:, None]
    return table


def masked_policy(table: np.ndarray) -> np.ndarray:
    """Return the probabilities of the letters [4, 3]."""
    weights = np.exp(table[:, LETTERS])
    return weights / weights.sum(axis=1, keepdims=True)


def true_gradient(table: np.ndarray) -> np.ndarray:
    chosen = masked_policy(table)
    returns = np.asarray([REWARDS[response] for response in RESPONSES]).reshape(3, 3)
    values = (chosen[1:] * returns).sum(axis=1)
    grad = np.zeros_like(table)
    grad[0, LETTERS] = chosen[0] * (values - chosen[0] @ values)
    grad[1:, LETTERS] = chosen[0][:, None] * chosen[1:] * (returns - values[:, None])
    return grad


def sampled(table: np.ndarray):
    """Return a sequence for each response, weighted by its probability under the grammar."""
    free = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    chosen, rollouts, odds = masked_policy(table), [], []
    for first, second in RESPONSES:
        state = LETTERS.index(first) + 1
        under_grammar = (chosen[0, state - 1], chosen[state, LETTERS.index(second)], 1.0)
        call = dataclasses.replace(
            transition([1], [first, second, END], forced=(False, False, True)),
            behavior_logprobs=(free[0, first], free[state, second], -5.0),
            sampling_logprobs=tuple(map(math.log, under_grammar)),
            grammar=GRAMMAR,
        )
        rollouts.append(trajectory(call, reward=REWARDS[first, second]))
        odds.append(math.prod(under_grammar))
    sequences, _ = prepare_step(rollouts, REINFORCE, policy_version=0)
    return [dataclasses.replace(s, weight=p) for s, p in zip(sequences, odds, strict=True)]


def loss_gradient(sequences, table: np.ndarray):
    """Return (the gradient of the loss with respect to the table, metric sums)."""
    (batch,), _ = make_batches(sequences, SHAPE)
    on_device = jax.device_put(batch)
    states = np.zeros_like(batch.positions)
    for index, letter in enumerate(LETTERS, start=1):
        states = np.where((batch.positions == 1) & (batch.tokens == letter), index, states)

    def loss(kernel):
        scores = score_nodes(
            {"head": {"kernel": kernel}}, on_device, jax.nn.one_hot(states, 4), Head(CONFIG),
            head_chunk=4,
        )  # fmt: skip
        return policy_loss(scores.logprobs, on_device, REINFORCE)

    grad, sums = jax.jit(jax.grad(loss, has_aux=True))(jnp.asarray(table, jnp.float32))
    return np.asarray(grad, np.float64), jax.device_get(sums)


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    return float((left * right).sum() / np.linalg.norm(left) / np.linalg.norm(right))


@pytest.mark.parametrize(("lost", "without"), [(0.05, 0.9995), (0.5, 0.95), (0.95, 0.85)])
def test_the_gradient_is_that_of_the_masked_policy(lost: float, without: float) -> None:
    table = logit_table(lost)
    wanted, sequences = -true_gradient(table), sampled(table)
    masked, metrics = with_masks(sequences, COMPILER)
    assert metrics["train/calls_without_mask"] == 0.0
    grad, sums = loss_gradient(masked, table)
    assert cosine(grad, wanted) > 0.999
    np.testing.assert_allclose(grad, wanted, atol=1e-6)
    assert sums["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert sums["train/mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
    shares = mask_metrics(sequences)["train/adjusted_share"], mask_metrics(masked)
    assert shares == (float(lost > 0.1), {"train/masked_share": 1.0, "train/adjusted_share": 0.0})
    unmasked, _ = loss_gradient(sequences, table)
    assert cosine(unmasked, wanted) < without
    assert np.abs(unmasked - wanted).max() > 1e-3
