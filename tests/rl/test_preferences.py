import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lightning_jax.config import BatchConfig
from lightning_jax.models.transformer import forward, unembed
from lightning_jax.rl.preferences import (
    PreferencePair,
    dpo_advantages,
    dpo_losses,
    dpo_objective,
    dpo_update,
    pair_sequences,
)
from lightning_jax.rl.train_state import init_state
from lightning_jax.rl.train_step import make_train_functions
from lightning_jax.testing.tiny import tiny_model

STRICT_PROMOTION = False  # optax mixes dtypes
MODEL = tiny_model(num_layers=1)
SGD = optax.sgd(1.0)  # the update is minus the gradient
BETA = 0.5
PAIRS = [
    PreferencePair((1, 2, 3), (4, 5), (6, 7, 8)),
    PreferencePair((1, 2, 9), (4, 4, 4, 4), (4, 4, 5)),
    PreferencePair((50, 51, 52, 53), (54,), (55, 56)),
]


def test_loss_and_its_slope_by_hand():
    # beta * margin = ln 3: -ln sigmoid = ln(1 + 1/3), sigmoid(-ln 3) = 1/4
    margins = np.asarray([0.0, 2 * math.log(3)])
    np.testing.assert_allclose(dpo_losses(margins, beta=0.5), [math.log(2), math.log(4 / 3)])
    np.testing.assert_allclose(dpo_advantages(margins, beta=0.5), [0.25, 0.125])
    assert np.isfinite(dpo_losses(np.asarray([-1e6, 1e6]), beta=1.0)).all()
    assert np.isfinite(dpo_advantages(np.asarray([-1e6, 1e6]), beta=1.0)).all()


def test_slope_against_finite_differences():
    margins = np.linspace(-3.0, 3.0, 7)
    rise = dpo_losses(margins + 1e-6, beta=0.7) - dpo_losses(margins - 1e-6, beta=0.7)
    np.testing.assert_allclose(dpo_advantages(margins, beta=0.7), -rise / 2e-6, atol=1e-8)


def plain_loss(params, ref_params, tokens, sampled):
    """The mean DPO loss, each response run by itself: arrays [pair, chosen or rejected, token]."""

    def total(params, tokens, sampled):
        positions = jnp.arange(len(tokens))[None]
        hidden, _ = forward(params, MODEL.config, tokens[None], positions)
        whole = jax.nn.log_softmax(unembed(params, MODEL.config, hidden)[0])
        logprobs = jnp.take_along_axis(whole[:-1], tokens[1:, None], axis=1)[:, 0]
        return jnp.where(sampled, logprobs, 0.0).sum()

    of_all = jax.vmap(jax.vmap(total, (None, 0, 0)), (None, 0, 0))
    gains = of_all(params, tokens, sampled) - of_all(ref_params, tokens, sampled)
    return -jax.nn.log_sigmoid(BETA * (gains[:, 0] - gains[:, 1])).mean()


def padded(pairs):
    tokens, sampled = np.zeros((len(pairs), 2, 8), np.int32), np.zeros((len(pairs), 2, 7), bool)
    for k, s in enumerate(pair_sequences(pairs)):
        ids, first = s.prompt_token_ids + s.response_token_ids, len(s.prompt_token_ids)
        tokens[k // 2, k % 2, : len(ids)] = ids
        sampled[k // 2, k % 2, first - 1 : len(ids) - 1] = True
    return tokens, sampled


def test_an_update_is_the_gradient_of_the_direct_loss_wherever_responses_lie():
    made = make_train_functions(MODEL.config, SGD, dpo_objective(), head_chunk=4)
    reference = jax.tree.map(lambda leaf: 1.5 * leaf, MODEL.params)
    loss, expected = jax.jit(jax.value_and_grad(plain_loss))(
        MODEL.params, reference, *padded(PAIRS)
    )
    # 16 nodes and 8 targets a row: of 15 targets some pairs are parted.
    shape = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)
    state = init_state(jax.tree.map(jnp.copy, MODEL.params), SGD)
    state, metrics = dpo_update(made, state, PAIRS, shape, reference, beta=BETA)
    assert metrics["train/num_rows"] > 1
    assert metrics["train/loss"] == pytest.approx(float(loss), abs=1e-5)
    assert metrics["train/dropped_pairs"] == 0.0
    for new, old, gradient in zip(
        *map(jax.tree.leaves, (state.params, MODEL.params, expected)), strict=True
    ):
        np.testing.assert_allclose(new, old - gradient, atol=1e-5)

    # A pair with a response that fits no row is left out whole.
    broken = [*PAIRS, PreferencePair((1,), (2,), (3,) * 9)]
    state = init_state(jax.tree.map(jnp.copy, MODEL.params), SGD)
    state, metrics = dpo_update(made, state, broken, shape, reference, beta=BETA)
    assert metrics["train/dropped_pairs"] == 1.0
    assert metrics["train/loss"] == pytest.approx(0.75 * float(loss), abs=1e-5)
    for new, old, gradient in zip(
        *map(jax.tree.leaves, (state.params, MODEL.params, expected)), strict=True
    ):
        np.testing.assert_allclose(new, old - 0.75 * gradient, atol=1e-5)
    with pytest.raises(ValueError, match="0 of 1 pairs can be trained on"):
        dpo_update(made, state, broken[3:], shape, reference, beta=BETA)
