"""Tests of sequences that a teacher scores, against the teacher run on each sequence alone."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lightning_jax.models.config import MeshConfig
from lightning_jax.models.sharding import make_mesh, param_shardings, put_on_mesh
from lightning_jax.models.transformer import forward, unembed
from lightning_jax.rl.batching import make_batches
from lightning_jax.rl.config import BatchConfig, DistillConfig
from lightning_jax.rl.distill import make_scorer, mix, teacher_metrics, with_scores
from lightning_jax.rl.losses.objectives import policy_objective
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.train_step import make_train_functions
from lightning_jax.rl.updater import Updater
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model

STRICT_PROMOTION = False  # optax mixes dtypes
MODEL = tiny_model(num_layers=1)
TEACHER = tiny_model(seed=1, num_layers=1, embed_dim=48)  # larger, with the same vocabulary
SHAPE = BatchConfig(rows=8, row_len=16, max_targets=8, head_chunk=4)
SEQUENCES = [
    sequence([1, 2], [3, 4]),
    sequence([1, 2], [3, 5, 6], loss_mask=(True, False, True)),
    dataclasses.replace(sequence([1, 7], [8], advantage=0.0), temperature=2.0),
    sequence([1, 2, 3, 4, 9], [2]),
    *(sequence([k], [k + 1, k + 2], weight=0.02 * k) for k in range(20, 28)),
]


def alone(model, item: TrainingSequence) -> list[float]:
    """Return the log-probabilities of a response by plain causal attention, 0 where not trained."""
    ids = jnp.asarray(item.prompt_token_ids + item.response_token_ids)
    hidden, _ = forward(model.params, model.config, ids[None], jnp.arange(len(ids))[None])
    logits = unembed(model.params, model.config, hidden)[0] / item.temperature
    whole = jax.nn.log_softmax(logits)
    first = len(item.prompt_token_ids)
    found = [float(whole[i - 1, ids[i]]) for i in range(first, len(ids))]
    return [v if trained else 0.0 for v, trained in zip(found, item.loss_mask, strict=True)]


def scores_of(shape: BatchConfig, sequences, mesh=None):
    mesh = make_mesh(mesh or MeshConfig(), jax.devices()[: 8 if mesh is None else 1])
    scorer = make_scorer(TEACHER.config, shape, mesh=mesh, dtype="float32")
    params = put_on_mesh(TEACHER.params, param_shardings(TEACHER.config, mesh))
    return scorer(params, sequences)


def test_a_teacher_of_another_shape_scores_the_forest_as_each_sequence_alone():
    for item, found in zip(SEQUENCES, scores_of(SHAPE, SEQUENCES), strict=True):
        np.testing.assert_allclose(np.asarray(found), alone(TEACHER, item), atol=1e-5)


def test_scores_do_not_depend_on_padding_packing_order_or_devices():
    wide = BatchConfig(rows=1, row_len=64, max_targets=64, head_chunk=8)
    known = scores_of(SHAPE, SEQUENCES)
    for found in (
        scores_of(wide, SEQUENCES, MeshConfig(1, 1, 1)),
        scores_of(SHAPE, SEQUENCES[::-1])[::-1],
    ):
        for ours, theirs in zip(known, found, strict=True):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5)
    assert scores_of(SHAPE, []) == []


def test_a_sequence_that_fits_no_row_is_not_scored_and_learns_without_the_teacher():
    long = sequence([1] * 20, [2])
    scores = scores_of(SHAPE, [long, SEQUENCES[0]])
    assert scores[0] is None and scores[1] is not None
    first, second = with_scores(mix([long, SEQUENCES[0]], coef=1.0, reward_coef=1.0), scores)
    assert (first.teacher_coef, first.teacher_logprobs) == (0.0, ())
    assert (second.teacher_coef, second.teacher_logprobs) == (1.0, scores[1])


def test_weights_and_metrics_by_hand():
    per_token = sequence([1], [2, 3], advantage=(1.0, -2.0))
    mixed = mix([sequence([1], [2, 3], advantage=3.0), per_token], coef=0.5, reward_coef=2.0)
    assert [item.advantage for item in mixed] == [6.0, (2.0, -4.0)]
    assert [item.teacher_coef for item in mixed] == [0.5, 0.5]
    # Behavior log-probs are -0.5 and -0.75. Only the first sequence was scored.
    scored = with_scores(mixed, [(-1.0, -0.25), None])
    assert teacher_metrics(scored) == {
        "train/teacher_share": 0.5,
        "train/kl_to_teacher": pytest.approx((0.5 - 0.5) / 2),
    }
    forced = dataclasses.replace(scored[0], loss_mask=(True, False))
    assert teacher_metrics([forced]) == {
        "train/teacher_share": 1.0,
        "train/kl_to_teacher": pytest.approx(0.5),
    }
    assert teacher_metrics(mixed) == {"train/teacher_share": 0.0}
    assert teacher_metrics([]) == {"train/teacher_share": 0.0}


def test_weight_falls_in_a_straight_line():
    distill = DistillConfig(teacher="tiny", coef=1.0, final_coef=0.2, anneal_steps=4)
    assert [distill.coef_at(step) for step in (0, 1, 4, 9)] == pytest.approx([1.0, 0.8, 0.2, 0.2])
    assert DistillConfig(teacher="tiny", coef=0.7).coef_at(99) == 0.7
    assert DistillConfig().coef_at(0) == 0.0


def learner(devices: int) -> Updater:
    """Build an updater whose update subtracts the gradient."""
    mesh, sgd = make_mesh(MeshConfig(), jax.devices()[:devices]), optax.sgd(1.0)
    functions = make_train_functions(
        MODEL.config, sgd, policy_objective(loss="reinforce"), head_chunk=SHAPE.head_chunk
    )
    return Updater(MODEL.config, mesh, sgd, functions, SHAPE, skip_zero_advantage=True)


def taught() -> list[TrainingSequence]:
    """Return sequences of which every other one was scored, some without an advantage."""
    mixed = mix(SEQUENCES, coef=0.5, reward_coef=0.0)
    scores = [alone(TEACHER, item) for item in mixed]
    odd = [None if k % 2 else tuple(found) for k, found in enumerate(scores)]
    return with_scores(mixed, odd)


def updated(devices: int, sequences):
    made = learner(devices)
    state = made.init(jax.tree.map(jnp.copy, MODEL.params))
    state, metrics = made.update(state, sequences, None)
    return jax.device_get(state.params), metrics


def test_an_update_is_the_gradient_by_hand_on_one_and_eight_devices():
    sequences = taught()

    def loss(params):
        """Return the sum of `weight * 0.5 * (log p - log q) * log p` with a constant gap."""
        model, total = dataclasses.replace(MODEL, params=params), 0.0
        for item in itertools.islice(sequences, 0, None, 2):
            ids = jnp.asarray(item.prompt_token_ids + item.response_token_ids)
            hidden, _ = forward(params, model.config, ids[None], jnp.arange(len(ids))[None])
            logits = unembed(params, model.config, hidden)[0] / item.temperature
            first = len(item.prompt_token_ids)
            whole = jax.nn.log_softmax(logits)[first - 1 : -1]
            own = jnp.take_along_axis(whole, ids[first:, None], axis=1)[:, 0]
            gap = jax.lax.stop_gradient(own) - jnp.asarray(item.teacher_logprobs)
            kept = jnp.asarray(item.loss_mask)
            total += item.weight * 0.5 * jnp.where(kept, gap * own, 0.0).sum()
        return total

    gradient = jax.grad(loss)(MODEL.params)
    for devices in (1, 8):
        params, metrics = updated(devices, sequences)
        assert metrics["train/num_updates"] == 1.0
        assert metrics["train/dropped_zero_advantage"] == len(sequences) // 2
        for new, old, slope in zip(
            *map(jax.tree.leaves, (params, MODEL.params, gradient)), strict=True
        ):
            np.testing.assert_allclose(new, old - slope, atol=1e-5)


def test_a_batch_without_scores_has_no_array_for_them():
    (batch,), _ = make_batches(SEQUENCES, SHAPE)
    assert batch.teacher is None
