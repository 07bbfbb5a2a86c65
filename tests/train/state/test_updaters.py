"""Tests of several updates over the data of one step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded import raises_coded

from lightning_jax.engine.config import ServeConfig
from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import MeshConfig
from lightning_jax.rl.batches.batching import make_batches, make_sequences
from lightning_jax.rl.batches.microbatches import BUNDLE_ON, measure
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.rl.token_weights import split_minibatches
from lightning_jax.rl.update.noise_scale import estimate_signal, split_halves
from lightning_jax.rl.update.train_state import TrainState
from lightning_jax.rl.update.train_step import update, with_old_logprobs, zero_accumulators
from lightning_jax.rl.update.updater import Updater
from lightning_jax.testing.records import sequence, trajectory, transition
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import CheckpointConfig, Config
from lightning_jax.train.state.checkpoint import Checkpointer, CheckpointError
from lightning_jax.train.state.updaters import phase_updater

MODEL = tiny_model(num_layers=1)
SHAPE = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)
STEP = [sequence([1, k], [9, k, 7], advantage=(-1.0) ** k, weight=0.1) for k in range(2, 8)]


def learner(**knobs) -> Updater:
    config = Config(
        algorithm=AlgorithmConfig(**knobs),
        serve=ServeConfig(max_len=16),
        batch=SHAPE,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        mesh=MeshConfig(fsdp=1),
    )
    return phase_updater(MODEL.config, config, supervised=False)


def fresh_state(made: Updater) -> TrainState:
    return made.init(jax.tree.map(jnp.copy, MODEL.params))


def test_epochs_and_minibatches_keep_the_old_policy_of_the_first_update():
    made = learner(
        proximal="old", correction="mask", correction_low=0.0, correction_high=1e9,
        num_epochs=2, num_minibatches=2,
    )  # fmt: skip
    state, metrics = made.update(fresh_state(made), STEP, None)
    assert metrics["train/num_updates"] == 4.0 and int(state.step) == 4
    assert metrics["train/num_tokens"] == 2 * 18  # in each of two passes
    assert metrics["train/num_sequences"] == 6.0
    assert metrics["train/ratio_max"] > 1.01  # the policy differs from the old one
    assert metrics["train/skipped_updates"] == 0.0

    # The same updates by hand.
    wanted = fresh_state(made)
    first = split_minibatches(STEP, 2, "0 0")
    second = split_minibatches([item for part in first for item in part], 2, "0 2 1", grows=False)
    chosen = [{item.prompt_token_ids for item in part} for part in (*first, *second)]
    assert chosen[2] not in chosen[:2]  # the second pass has other minibatches
    parts = [make_batches(part, SHAPE)[0] for part in (*first, *second)]
    for part in [with_old_logprobs(made.functions, MODEL.params, part) for part in parts]:
        wanted, _ = update(made.functions, wanted, part)
    for got, want in zip(*map(jax.tree.leaves, (state.params, wanted.params)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_later_pass_keeps_what_a_kl_charged():
    """The advantages of all passes are those of the policy before the first update."""
    knobs = {"kl_coef": 0.5, "kl_estimator": "k1", "kl_in": "reward"}
    made = learner(**knobs, num_epochs=2, num_minibatches=2)
    rollouts = [
        trajectory(transition([1, k], [3]), transition([1, k, 3, 4], [5, 6]), rollout=f"r{k}")
        for k in range(2, 6)
    ]
    sequences = make_sequences(rollouts, [(1.0, -1.0)] * len(rollouts))
    parts = [(part, make_batches(part, SHAPE)[0]) for part in (sequences[:4], sequences[4:])]
    changed = [
        [dataclasses.replace(b, advantages=b.advantages - 0.25 * b.target_mask) for b in batches]
        for _, batches in parts
    ]
    fixed = made._fixed(parts, changed)
    assert [item.advantage for item in fixed] == [(0.75,), (-1.25, -1.25)] * 4
    minibatches, _ = made._drawn_anew(fixed, fresh_state(made), 1)
    values = np.concatenate(
        [np.asarray(b.advantages)[np.asarray(b.target_mask)] for part in minibatches for b in part]
    )
    assert sorted(values) == [-1.25] * 8 + [0.75] * 4


def test_one_update_needs_no_old_policy():
    made = learner(proximal="old")
    state, metrics = made.update(fresh_state(made), STEP, None)
    assert int(state.step) == metrics["train/num_updates"] == 1
    assert metrics["train/ratio_max"] == 1.0
    assert made.functions.logprobs_fn._cache_size() == 0  # type: ignore[attr-defined]


def test_nothing_to_learn_from_is_no_update():
    made = learner(num_minibatches=2)
    for step in ([], [sequence([1], []), sequence([1], [2], advantage=0.0)]):
        state, metrics = made.update(fresh_state(made), step, None)
        assert int(state.step) == metrics["train/num_updates"] == metrics["train/num_batches"] == 0
        assert metrics["train/skipped_updates"] == 1.0


def test_no_minibatch_is_spent_on_what_has_no_gradient():
    made = learner(num_minibatches=3)
    still = [sequence([1, k], [9, k], advantage=0.0, weight=0.1) for k in range(20, 40)]
    state, metrics = made.update(fresh_state(made), [*still, *STEP[:3]], None)
    assert int(state.step) == metrics["train/num_updates"] == 3
    assert metrics["train/num_sequences"] == 3.0
    assert metrics["train/dropped_zero_advantage"] == 20.0


def test_later_calls_cost_earlier_ones_their_kl():
    """Compare the gradient of two calls with that of single calls with advantages by hand."""
    knobs = {"kl_coef": 0.5, "kl_estimator": "k1", "kl_in": "reward"}
    made = learner(**knobs)
    step = [trajectory(transition([1, 2], [3]), transition([1, 2, 3, 4], [5, 6]), reward=1.0)]
    sequences = make_sequences(step, [(1.0, -1.0)])
    reference = jax.tree.map(lambda leaf: leaf * 1.05, MODEL.params)
    (batch,), _ = make_batches(sequences, SHAPE)
    old, ref = (
        measure(made.functions.logprobs_fn, [batch], weights)[0]
        for weights in (MODEL.params, reference)
    )
    second = np.asarray(batch.target_calls) == 1
    cost = float(np.asarray(old - ref)[second].sum())
    assert abs(cost) > 1e-3
    charged, _ = made.update(fresh_state(made), sequences, reference)
    alone = [dataclasses.replace(sequence, rollout=None) for sequence in sequences]
    alone[0] = dataclasses.replace(alone[0], advantage=1.0 - 0.5 * cost)
    by_hand, _ = made.update(fresh_state(made), alone, reference)
    for got, want in zip(*map(jax.tree.leaves, (charged.params, by_hand.params)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


GROUPS = [
    dataclasses.replace(sequence([1, 10 + k], [9, k, 7], advantage=(-1.0) ** k), group=k // 2)
    for k in range(12)
]


def test_an_update_measures_the_first_half_alone() -> None:
    made = learner()
    state = fresh_state(made)
    batches, _ = make_batches(GROUPS, SHAPE)
    halves = split_halves(batches, GROUPS)
    assert halves is not None
    grads, sums = zero_accumulators(made.functions, state.params)
    count = np.asarray(1, np.int32)
    for index in halves.order[: halves.num_first]:
        grads, sums = made.functions.grads_fn(
            state.params, grads, sums, (batches[index],), count, None, None, None
        )
    first = float(made.functions.norm_fn(grads))
    _, metrics = made.update(state, GROUPS, None)
    expected = estimate_signal(first, metrics["train/grad_norm"], halves, 6.0)
    assert (metrics["train/grad_signal"], metrics["train/grad_noise"]) == pytest.approx(
        expected, rel=1e-4
    )
    assert "first_grad_norm" not in metrics


def test_several_updates_have_one_estimate() -> None:
    made = learner(num_minibatches=2, num_epochs=2)
    _, metrics = made.update(fresh_state(made), GROUPS, None)
    assert metrics["train/num_updates"] == 4 and "train/grad_noise" in metrics


def two_rollouts():
    """Return two rollouts of one group: two calls and a reward, and two calls without a reward."""
    return [
        trajectory(transition([1, 2], [3]), transition([1, 2, 3], [4, 5]), reward=1.0),
        trajectory(transition([1, 2], [6]), transition([7] * 99, [8]), rollout="s"),
    ]


@pytest.mark.parametrize("credit", ["learned", "learned_token"])
def test_a_new_critic_gives_identical_credit_and_then_learns(credit):
    made = learner(
        credit=credit, value_learning_rate=0.1, num_epochs=2, num_minibatches=2, value_clip=0.2
    )
    algorithm = AlgorithmConfig(credit=credit)
    state, errors, metrics = fresh_state(made), [], {}
    for step in range(8):
        values, timing = made.values(state, two_rollouts())
        assert (
            values is not None and values[1][1] is None and list(timing) == ["time/values_s"]
        )  # too long for a row
        sequences, metrics = prepare_step(
            two_rollouts(), algorithm, policy_version=0, values=values
        )
        assert metrics["train/calls_without_value"] == 1.0
        if step == 0:
            plain, _ = prepare_step(two_rollouts(), AlgorithmConfig(), policy_version=0)
            wanted = [np.broadcast_to(s.advantage, len(s.response_token_ids)) for s in plain]
            for got, want in zip(sequences, wanted, strict=True):
                np.testing.assert_array_equal(np.broadcast_to(got.advantage, want.shape), want)
        state, metrics = made.update(state, sequences, None)
        assert metrics["train/num_updates"] == 4.0
        errors.append(metrics["train/value_loss"])
    assert errors[-1] < errors[0] / 2
    assert metrics["train/value_clip_fraction"] <= 1.0


def test_the_critic_is_saved_and_is_no_part_of_the_policy(tmp_path):
    made = learner(credit="learned", value_learning_rate=0.1)
    rollouts = two_rollouts()
    values, _ = made.values(fresh_state(made), rollouts)
    sequences, _ = prepare_step(
        rollouts, AlgorithmConfig(credit="learned"), policy_version=0, values=values
    )
    state, _ = made.update(fresh_state(made), sequences, None)
    assert np.abs(state.critic.head.kernel).max() > 0
    assert jax.tree.structure(state.params) == jax.tree.structure(MODEL.params)
    checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig())
    checkpointer.save(1, state, {})
    again = checkpointer.restore(fresh_state(made))
    for got, want in zip(*map(jax.tree.leaves, (again, state)), strict=True):
        np.testing.assert_array_equal(got, want)
    with raises_coded(CheckpointError, "mismatch") as caught:
        checkpointer.restore(fresh_state(learner()))
    assert "critic" in (caught.value.key or "") and "None" in str(caught.value)
    checkpointer.close()


def test_learned_credit_without_values_is_refused():
    with raises_coded(InvalidValue, "missing", "values"):
        prepare_step(two_rollouts(), AlgorithmConfig(credit="learned"), policy_version=0)
    assert learner().values(fresh_state(learner()), two_rollouts()) == (None, {})


def test_twenty_steps_of_random_data_compile_the_gradient_once(
    caplog: pytest.LogCaptureFixture,
):
    made, rng = learner(), np.random.default_rng(0)
    state, numbers_of_bundles = fresh_state(made), set()
    for _ in range(20):
        step = [
            sequence(
                rng.integers(3, 200, rng.integers(1, 8)).tolist(),
                rng.integers(3, 200, rng.integers(1, 8)).tolist(),
                advantage=float(rng.normal()),
                weight=0.1,
            )
            for _ in range(rng.integers(1, 24))
        ]
        with jax.log_compiles():
            state, metrics = made.update(state, step, None)
        numbers_of_bundles.add(-(-int(metrics["train/num_batches"]) // BUNDLE_ON["cpu"]))
    compiled = [
        record.getMessage().split()[1]
        for record in caplog.records
        if record.getMessage().startswith("Compiling ")
    ]
    assert len(numbers_of_bundles) > 1
    assert compiled.count("jit(add_grads)") == 1
    assert compiled.count("jit(apply)") == 1
