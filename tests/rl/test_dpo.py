import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from coded import raises_coded

from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.transformer import forward, unembed
from lightning_jax.rl.advantages import make_pairs
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.rl.credit import assign_credit
from lightning_jax.rl.dpo import (
    dpo_advantages,
    dpo_losses,
    drop_broken_pairs,
    pair_sequences,
    weigh_pairs,
)
from lightning_jax.rl.losses.objectives import policy_objective
from lightning_jax.rl.update.train_state import init_state
from lightning_jax.rl.update.train_step import make_train_functions
from lightning_jax.rl.update.updater import Updater
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config

STRICT_PROMOTION = False  # optax mixes dtypes
MODEL = tiny_model(num_layers=1)
DPO = AlgorithmConfig(loss="dpo", dpo_beta=0.5)
# With 16 nodes and 8 targets per row, some pairs of the 20 targets are in different rows.
SHAPE = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)
# Three groups of two. The agent's second call continues its first one after an observation.
STEP = [
    trajectory(transition([1, 2, 3], [4, 5]), transition([1, 2, 3, 4, 5, 60], [7]), reward=1.0),
    trajectory(transition([1, 2, 3], [6, 7, 8]), reward=0.0),
    trajectory(transition([1, 2, 9], [4, 4, 5]), reward=-1.0, group="h"),
    trajectory(
        transition([1, 2, 9], [4, 4, 4, 4]), transition([30, 31], [32, 33]), reward=0.5, group="h"
    ),
    trajectory(transition([50, 51, 52, 53], [54]), reward=0.2, group="i"),
    trajectory(transition([50, 51, 52, 53], [55, 56, 57], forced=(False, True, False)), group="i"),
]
PAIRS = [(0, 1), (3, 2), (4, 5)]


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
    """Return the mean DPO loss with each call run alone, from arrays [pair, side, call, token]."""

    def total(params, tokens, sampled):
        positions = jnp.arange(len(tokens))[None]
        hidden, _ = forward(params, MODEL.config, tokens[None], positions)
        whole = jax.nn.log_softmax(unembed(params, MODEL.config, hidden)[0])
        logprobs = jnp.take_along_axis(whole[:-1], tokens[1:, None], axis=1)[:, 0]
        return jnp.where(sampled, logprobs, 0.0).sum()

    of_all = total
    for _ in range(3):
        of_all = jax.vmap(of_all, (None, 0, 0))
    gains = (of_all(params, tokens, sampled) - of_all(ref_params, tokens, sampled)).sum(axis=2)
    return -jax.nn.log_sigmoid(DPO.dpo_beta * (gains[:, 0] - gains[:, 1])).mean()


def padded():
    tokens = np.zeros((len(PAIRS), 2, 2, 8), np.int32)
    sampled = np.zeros((len(PAIRS), 2, 2, 7), bool)
    for k, pair in enumerate(PAIRS):
        for side, index in enumerate(pair):
            for number, call in enumerate(STEP[index].transitions):
                ids, first = call.prompt_token_ids + call.response_token_ids, call.prompt_token_ids
                tokens[k, side, number, : len(ids)] = ids
                chosen = [not forced for forced in call.forced]
                sampled[k, side, number, len(first) - 1 : len(ids) - 1] = chosen
    return tokens, sampled


def plain_learner() -> Updater:
    """Build a learner whose update is minus the gradient."""
    sgd = optax.sgd(1.0)
    return Updater(
        model=MODEL.config,
        mesh=make_mesh(MeshConfig(fsdp=1)),
        optimizer=sgd,
        functions=make_train_functions(MODEL.config, sgd, policy_objective(DPO), head_chunk=4),
        batch=SHAPE,
        skip_zero_advantage=True,
        dpo_beta=DPO.dpo_beta,
    )


def test_an_update_is_the_gradient_of_the_direct_loss_wherever_calls_lie():
    made = plain_learner()
    reference = jax.tree.map(lambda leaf: 1.5 * leaf, MODEL.params)
    loss, expected = jax.jit(jax.value_and_grad(plain_loss))(MODEL.params, reference, *padded())
    assert make_pairs(assign_credit(STEP, DPO), DPO, policy_version=0) == (PAIRS, 0)

    def check(state, metrics, share):
        assert metrics["train/loss"] == pytest.approx(share * float(loss), abs=1e-5)
        for new, old, gradient in zip(
            *map(jax.tree.leaves, (state.params, MODEL.params, expected)), strict=True
        ):
            np.testing.assert_allclose(new, old - share * gradient, atol=1e-5)

    def fresh():
        return init_state(jax.tree.map(jnp.copy, MODEL.params), made.optimizer)

    sequences = pair_sequences(STEP, PAIRS)
    state, metrics = made.update(fresh(), sequences, reference)
    assert metrics["train/num_rows"] > 1 and metrics["train/dropped_pairs"] == 0.0
    assert metrics["train/tokens_forced"] == 1.0
    check(state, metrics, share=1.0)

    # A pair with a call that does not fit into a row is dropped, but still counts in the mean.
    long = trajectory(transition([1], [2]), transition([1], [3] * 9), reward=-1.0)
    sequences = pair_sequences([*STEP, trajectory(transition([1], [5])), long], [*PAIRS, (6, 7)])
    state, metrics = made.update(fresh(), sequences, reference)
    assert metrics["train/dropped_pairs"] == 1.0
    check(state, metrics, share=0.75)
    kept, num_broken = drop_broken_pairs(sequences, SHAPE)
    assert num_broken == 1 and {sequence.pair for sequence in kept} == {0, 1, 2}

    # Without a pair there is no update.
    state, metrics = made.update(fresh(), sequences[-3:], reference)
    assert metrics["train/num_updates"] == metrics["train/dropped_pairs"] - 1.0 == 0.0
    assert int(state.step) == 0


def test_margins_by_hand_and_apart_by_policy():
    pair = [trajectory(transition([1], [2])), trajectory(transition([1], [3]))]
    one = pair_sequences(pair, [(0, 1)])
    both = [
        dataclasses.replace(sequence, adapter=adapter) for adapter in (0, 1) for sequence in one
    ]
    (first, second), _ = make_batches(both, SHAPE)  # a row for each policy
    # Margins are 1 + 1 and 0 - 0.5. At beta 1 the slopes are sigmoid(-2) and sigmoid(0.5).
    by_token = [{2: (-1.0, -2.0), 3: (-2.0, -1.0)}, {2: (-1.0, -1.0), 3: (-1.0, -1.5)}]
    policy, reference = [
        [
            np.asarray([[known.get(token, (9.0, -9.0))[side] for token in batch.target_ids[0]]])
            for batch, known in zip((first, second), by_token, strict=True)
        ]
        for side in (0, 1)
    ]
    advantages, metrics = weigh_pairs(both, [first, second], policy, reference, beta=1.0)
    slopes = 1 / (1 + math.exp(2.0)), 1 / (1 + math.exp(-0.5))
    for batch, values, slope in zip((first, second), advantages, slopes, strict=True):
        signs = {2: 1.0, 3: -1.0}
        wanted = [[slope * signs.get(token, 0.0) for token in batch.target_ids[0].tolist()]]
        np.testing.assert_allclose(values, wanted, rtol=1e-6)
        assert values.dtype == np.float32
    assert metrics == {
        "train/loss": pytest.approx(math.log1p(math.exp(-2.0)) + math.log1p(math.exp(0.5))),
        "train/preference_accuracy": 0.5,
        "train/preference_margin": 0.75,
    }


@pytest.mark.parametrize(
    "setting, reason",
    [
        ("dpo_beta=0", "out_of_range"),
        ("kl_coef=0.1", "conflict"),
        ("credit=per_step", "conflict"),
        ("num_minibatches=2", "conflict"),
        ("policy_updates=joint", "conflict"),
    ],
)
def test_what_dpo_has_no_place_for_is_refused(setting, reason):
    with raises_coded(ConfigError, reason, f"algorithm.{setting.partition('=')[0]}"):
        load_config(Config, ["algorithm.loss=dpo", f"algorithm.{setting}"])
