"""Tests of sequences that a teacher scores, against the teacher run on each sequence alone.

Hints in the prompts that a teacher reads are tested by hand.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.sharding import param_shardings, put_on_mesh
from lightning_jax.models.transformer import forward, unembed
from lightning_jax.rl.batches.batch import NO_TOKEN
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import BatchConfig, DistillConfig
from lightning_jax.rl.distill import (
    count_unscored,
    hint_positions,
    insert_hints,
    make_scorer,
    teacher_metrics,
    weigh_teacher,
    with_hints,
    with_scores,
)
from lightning_jax.rl.losses.objectives import policy_objective
from lightning_jax.rl.sequence import LikelyTokens, TeacherScores, TrainingSequence
from lightning_jax.rl.update.train_step import make_train_functions
from lightning_jax.rl.update.updater import Updater
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model

STRICT_PROMOTION = False  # optax mixes dtypes
MODEL = tiny_model(num_layers=1)
TEACHER = tiny_model(seed=1, num_layers=1, embed_dim=48)  # larger, with the same vocabulary
SHAPE = BatchConfig(rows=8, row_len=16, max_targets=8, head_chunk=4)
TOP_K = 5
SEQUENCES = [
    sequence([1, 2], [3, 4]),
    sequence([1, 2], [3, 5, 6], loss_mask=(True, False, True)),
    dataclasses.replace(sequence([1, 7], [8], advantage=0.0), temperature=2.0),
    sequence([1, 2, 3, 4, 9], [2]),
    *(sequence([k], [k + 1, k + 2], weight=0.02 * k) for k in range(20, 28)),
]


def alone(model, item: TrainingSequence):
    """Return the log-probabilities [T, V] at a response's tokens by plain causal attention."""
    ids = jnp.asarray(item.prompt_token_ids + item.response_token_ids)
    hidden, _ = forward(model.params, model.config, ids[None], jnp.arange(len(ids))[None])
    logits = unembed(model.params, model.config, hidden)[0] / item.temperature
    return jax.nn.log_softmax(logits)[len(item.prompt_token_ids) - 1 : -1]


def scores_alone(model, item: TrainingSequence, top_k: int = 0) -> TeacherScores:
    """Return the scores of a response by `alone`."""
    whole = alone(model, item)
    own = jnp.take_along_axis(whole, jnp.asarray(item.response_token_ids)[:, None], axis=1)[:, 0]
    kept = tuple(jnp.where(jnp.asarray(item.loss_mask), own, 0.0).tolist())
    best, ids = jax.lax.top_k(whole, top_k)
    top = LikelyTokens(np.asarray(ids), np.asarray(best)) if top_k else None
    return TeacherScores(kept, top)


def named(logprobs: tuple[float, ...], ids: Any, probabilities: Any) -> TeacherScores:
    top = LikelyTokens(np.asarray(ids), np.log(np.asarray(probabilities, np.float32)))
    return TeacherScores(logprobs, top)


def scores_of(shape: BatchConfig, sequences, mesh=None, top_k: int = 0):
    mesh = make_mesh(mesh or MeshConfig(), jax.devices()[: 8 if mesh is None else 1])
    scorer = make_scorer(TEACHER.config, shape, mesh=mesh, dtype="float32", top_k=top_k)
    params = put_on_mesh(TEACHER.params, param_shardings(TEACHER.config, mesh))
    return scorer(params, sequences)


def assert_same_scores(
    found: TeacherScores | None, expected: TeacherScores | None, item: TrainingSequence
) -> None:
    """Compare the scores of trained tokens; the others have none."""
    assert found is not None and expected is not None
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    if found.top is None or expected.top is None:
        assert found.top is None and expected.top is None
        return
    kept = list(item.loss_mask)
    np.testing.assert_array_equal(found.top.ids[kept], expected.top.ids[kept])
    np.testing.assert_allclose(found.top.logprobs[kept], expected.top.logprobs[kept], atol=1e-5)


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_teacher_of_another_shape_scores_the_forest_as_each_sequence_alone(top_k: int):
    found = scores_of(SHAPE, SEQUENCES, top_k=top_k)
    for item, scores in zip(SEQUENCES, found, strict=True):
        assert_same_scores(scores, scores_alone(TEACHER, item, top_k), item)


def test_scores_do_not_depend_on_padding_packing_order_or_devices():
    wide = BatchConfig(rows=1, row_len=64, max_targets=64, head_chunk=8)
    known = scores_of(SHAPE, SEQUENCES, top_k=3)
    for found in (
        scores_of(wide, SEQUENCES, MeshConfig(1, 1, 1), top_k=3),
        scores_of(SHAPE, SEQUENCES[::-1], top_k=3)[::-1],
    ):
        for ours, theirs, item in zip(known, found, SEQUENCES, strict=True):
            assert_same_scores(ours, theirs, item)
    assert scores_of(SHAPE, []) == []


def test_a_teacher_names_only_ids_of_the_policy():
    """A vocabulary may be padded further than the policy's. There may be fewer tokens than K."""
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    scorer = make_scorer(TEACHER.config, SHAPE, mesh=mesh, dtype="float32", top_k=300, num_ids=9)
    item = SEQUENCES[0]
    (found,) = scorer(TEACHER.params, [item])
    assert found is not None and found.top is not None and found.top.ids.shape == (2, 259)
    whole = np.asarray(alone(TEACHER, item))
    for ids, logprobs, expected in zip(*found.top, whole, strict=True):
        assert sorted(ids[:9]) == list(range(9))
        np.testing.assert_allclose(logprobs[:9], expected[ids[:9]], atol=1e-5)
        assert (logprobs[9:] == NO_TOKEN).all()


def test_a_sequence_that_fits_no_row_is_not_scored_and_learns_without_the_teacher():
    long = sequence([1] * 20, [2])
    scores = scores_of(SHAPE, [long, SEQUENCES[0]])
    assert scores[0] is None and scores[1] is not None
    first, second = with_scores(
        weigh_teacher([long, SEQUENCES[0]], coef=1.0, reward_coef=1.0), scores
    )
    assert (first.teacher_coef, first.teacher_scores) == (0.0, None)
    assert (second.teacher_coef, second.teacher_scores) == (1.0, scores[1])


def test_weights_and_metrics_by_hand():
    per_token = sequence([1], [2, 3], advantage=(1.0, -2.0))
    mixed = weigh_teacher(
        [sequence([1], [2, 3], advantage=3.0), per_token], coef=0.5, reward_coef=2.0
    )
    assert [item.advantage for item in mixed] == [6.0, (2.0, -4.0)]
    assert [item.teacher_coef for item in mixed] == [0.5, 0.5]
    # Behavior log-probs are -0.5 and -0.75. Only the first sequence was scored.
    scored = with_scores(mixed, [TeacherScores((-1.0, -0.25)), None])
    assert teacher_metrics(scored) == {
        "train/teacher_share": 0.5,
        "train/kl_to_teacher": pytest.approx((0.5 - 0.5) / 2),
    }
    forced = dataclasses.replace(scored[0], loss_mask=(True, False))
    assert teacher_metrics([forced]) == {
        "train/teacher_share": 1.0,
        "train/kl_to_teacher": pytest.approx(0.5),
    }
    names = named((-1.0, -0.25), [[1, 2], [1, 2]], [[0.5, 0.25], [0.5, 0.4]])
    (told,) = with_scores(mixed[:1], [names])
    assert teacher_metrics([told])["train/teacher_named_mass"] == pytest.approx(0.825)
    assert teacher_metrics(mixed) == {"train/teacher_share": 0.0}
    assert teacher_metrics([]) == {"train/teacher_share": 0.0}


def test_calls_that_a_server_leaves_out_have_another_temperature():
    scores = [None, TeacherScores((-1.0,)), None]
    for by_server, number in ((True, 2.0), (False, 0.0)):
        assert count_unscored(scores, by_server=by_server) == {
            "train/without_teacher": 2.0,
            "train/other_temperature": number,
        }


def test_weight_falls_in_a_straight_line():
    distill = DistillConfig(teacher="tiny", coef=1.0, final_coef=0.2, anneal_steps=4)
    assert [distill.coef_at(step) for step in (0, 1, 4, 9)] == pytest.approx([1.0, 0.8, 0.2, 0.2])
    assert DistillConfig(teacher="tiny", coef=0.7).coef_at(99) == 0.7
    assert DistillConfig().coef_at(0) == 0.0


def learner(devices: int, mesh_config: MeshConfig | None = None) -> Updater:
    """Build an updater whose update subtracts the gradient."""
    mesh = make_mesh(mesh_config or MeshConfig(), jax.devices()[:devices])
    sgd = optax.sgd(1.0)
    functions = make_train_functions(
        MODEL.config, sgd, policy_objective(loss="reinforce"), head_chunk=SHAPE.largest_chunk
    )
    return Updater(MODEL.config, mesh, sgd, functions, SHAPE, skip_zero_advantage=True)


def taught(kl: str = "sampled") -> list[TrainingSequence]:
    """Return sequences of which every other one was scored, some without an advantage."""
    mixed = weigh_teacher(SEQUENCES, coef=0.5, reward_coef=0.0, kl=kl)
    scores = [scores_alone(TEACHER, item, 0 if kl == "sampled" else TOP_K) for item in mixed]
    return with_scores(mixed, [None if k % 2 else found for k, found in enumerate(scores)])


def updated(devices: int, sequences, mesh: MeshConfig | None = None):
    made = learner(devices, mesh)
    state = made.init(jax.tree.map(jnp.copy, MODEL.params))
    state, metrics = made.update(state, sequences, None)
    return jax.device_get(state.params), metrics


def loss_alone(params, item: TrainingSequence, kl: str):
    """Return the sum of `weight * 0.5 * KL` of a sequence; sampled: its gradient by one sample."""
    whole, scores = alone(dataclasses.replace(MODEL, params=params), item), item.teacher_scores
    assert scores is not None
    if kl == "sampled":
        own = jnp.take_along_axis(whole, jnp.asarray(item.response_token_ids)[:, None], axis=1)[
            :, 0
        ]
        terms = jax.lax.stop_gradient(own - jnp.asarray(scores.logprobs)) * own
    else:
        assert scores.top is not None
        own = jnp.take_along_axis(whole, jnp.asarray(scores.top.ids), axis=1)
        p, q = jnp.exp(own), jnp.exp(jnp.asarray(scores.top.logprobs))
        p, q = (jnp.concatenate([x, 1 - x.sum(1, keepdims=True)], axis=1) for x in (p, q))
        p, q = (q, p) if kl == "forward" else (p, q)
        terms = (p * jnp.log(p / q)).sum(axis=1)
    return item.weight * 0.5 * jnp.where(jnp.asarray(item.loss_mask), terms, 0.0).sum()


@pytest.mark.parametrize("kl", ["sampled", "forward", "reverse"])
def test_an_update_is_the_gradient_by_hand_on_one_and_eight_devices(kl: str):
    sequences = taught(kl)

    def loss(params):
        scored = itertools.islice(sequences, 0, None, 2)
        return sum(loss_alone(params, item, kl) for item in scored)

    gradient = jax.grad(loss)(MODEL.params)
    for devices, mesh in ((1, None), (8, None), (8, MeshConfig(data=2, fsdp=2, tensor=2))):
        params, metrics = updated(devices, sequences, mesh)
        assert metrics["train/num_updates"] == 1.0
        assert metrics["train/dropped_zero_advantage"] == len(sequences) // 2
        for new, old, slope in zip(
            *map(jax.tree.leaves, (params, MODEL.params, gradient)), strict=True
        ):
            np.testing.assert_allclose(new, old - slope, atol=1e-5)


def test_packing_and_padding_change_nothing_that_a_teacher_teaches():
    wide = BatchConfig(rows=1, row_len=64, max_targets=64, head_chunk=8)
    sequences = taught("forward")
    known, metrics = updated(1, sequences)
    made = dataclasses.replace(learner(1), batch=wide)
    state = made.init(jax.tree.map(jnp.copy, MODEL.params))
    state, others = made.update(state, sequences[::-1], None)
    assert metrics["train/distill_kl"] == pytest.approx(others["train/distill_kl"], rel=1e-4)
    for ours, theirs in zip(*map(jax.tree.leaves, (known, state.params)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_siblings_with_other_hints_learn_from_their_own_teacher():
    """They sampled one token after one node, for which the teacher read two prompts."""
    item = dataclasses.replace(sequence([1, 2], [3]), teacher_coef=1.0)
    scores = [named((-1.0,), [[7, 8]], [[q, 0.9 - q]]) for q in (0.8, 0.1)]
    some = [
        dataclasses.replace(item, teacher_prompt_ids=(1, k, 2), teacher_scores=scores[k])
        for k in (0, 1, 0)
    ]
    (batch,), metrics = make_batches([*some, item], SHAPE)
    assert metrics["train/num_distinct_targets"] == 3.0
    pairs = batch.distinct.of_targets[0, :4]
    told = np.exp(batch.teacher.top.logprobs[0, pairs])
    order = np.argsort(batch.target_calls[0, :4])
    np.testing.assert_allclose(
        told[order], [[0.8, 0.1], [0.1, 0.8], [0.8, 0.1], [0.0, 0.0]], rtol=1e-5
    )
    assert batch.teacher.coefs[0, :4][order].tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_batch_without_scores_has_no_array_for_them():
    (batch,), _ = make_batches(SEQUENCES, SHAPE)
    assert batch.teacher is None
    (batch,), _ = make_batches(taught(), SHAPE)
    assert batch.teacher.top is None


def test_a_teacher_moves_the_policy_to_what_it_never_samples():
    """The teacher likes one token and finds the sampled one as likely as the policy does."""
    liked, sampled = 100, 3
    item = sequence([1, 2], [sampled], advantage=0.0, weight=0.01)

    def probability(params) -> float:
        return float(jnp.exp(alone(dataclasses.replace(MODEL, params=params), item)[0, liked]))

    logprob = float(alone(MODEL, item)[0, sampled])
    names = named((logprob,), [[liked]], [[0.9]])
    before = probability(MODEL.params)
    assert before < 0.01
    for scores, moves in ((TeacherScores((logprob,)), False), (names, True)):
        (taught_item,) = with_scores(weigh_teacher([item], coef=1.0, reward_coef=0.0), [scores])
        params, _ = updated(1, [taught_item])
        assert (probability(params) > 1.2 * before) is moves


# Hints

END = 9
HINT = (50, 51)


def test_a_hint_stands_at_the_end_of_the_last_message_before_the_response():
    prompt = (1, 2, END, 3, 4, END, 5)  # system, user, header of the assistant
    assert insert_hints([prompt], HINT, END) == [(1, 2, END, 3, 4, *HINT, END, 5)]


def test_later_calls_have_the_hint_where_the_first_one_has_it():
    first = (1, END, 2, END, 5)
    second = (*first, 7, END, 3, END, 5)
    dropped = (1, END, 2, END, 6, 7, END, 3, END, 5)  # a template that rewrites old responses
    assert hint_positions([first, second, dropped], END) == [3, 3, 3]


def test_another_conversation_has_a_place_of_its_own():
    first, other = (1, 2, END, 5), (4, 4, 4, END, 5)
    assert hint_positions([first, other, (*other, 8, END, 5), first], END) == [2, 3, 3, 2]
    # It may begin with the messages of an earlier one.
    assert hint_positions([(*first[:3], 4, END, 5), first], END) == [4, 2]


def test_a_question_that_another_prompt_repeats_has_its_hint_there():
    """A call without tools has another system message, and ends with what the tool returned."""
    first = (1, 9, END, 2, 3, END, 5)
    untooled = (1, END, 2, 3, END, 5, 6, END, 7, END, 5)
    assert hint_positions([first, untooled, (*untooled, 8, END, 5)], END) == [5, 4, 4]
    # Only the whole message counts.
    assert hint_positions([first, (1, END, 3, END, 4, END, 5)], END) == [5, 5]
    assert hint_positions([(2, END, 5), (4, 2, END, 6, END)], END) == [1, 4]


def test_a_prompt_without_messages_has_no_place():
    assert insert_hints([(1, 2, 3), (1, END)], HINT, END) == [None, (1, *HINT, END)]
    assert insert_hints([], HINT, END) == []


def test_sequences_without_a_hint_have_no_teacher():
    taught = dataclasses.replace(sequence([1, END], [4]), rollout=0, teacher_coef=0.5)
    hinted = {(0, (1, END)): (1, *HINT, END)}
    known, other, stray = with_hints(
        [
            taught,
            dataclasses.replace(taught, rollout=1),
            dataclasses.replace(taught, rollout=None),
        ],
        hinted,
    )
    assert (known.teacher_coef, known.teacher_prompt_ids) == (0.5, (1, *HINT, END))
    assert known.prompt_token_ids == (1, END) and known.response_token_ids == (4,)
    for item in (other, stray):
        assert (item.teacher_coef, item.teacher_prompt_ids) == (0.0, ())


def test_scores_are_those_of_the_sampled_ids_after_the_hinted_prompt():
    """Compare with plain attention over each hinted prompt and the same response."""
    items = [
        dataclasses.replace(sequence([1, k, END], [3, 4]), rollout=k, temperature=1.5)
        for k in range(12)
    ]
    items += [dataclasses.replace(items[0], response_token_ids=(3, 8))]  # a sibling
    hinted = {(k, (1, k, END)): (1, k, *HINT, k, END) for k in range(12)}
    asked = with_hints(weigh_teacher(items, coef=1.0, reward_coef=0.0), hinted)
    for devices in (None, MeshConfig(1, 1, 1)):
        for item, found in zip(asked, scores_of(SHAPE, asked, devices, 4), strict=True):
            whole = dataclasses.replace(item, prompt_token_ids=item.teacher_prompt_ids)
            assert_same_scores(found, scores_alone(TEACHER, whole, 4), item)
            assert not np.allclose(alone(TEACHER, item), alone(TEACHER, whole), atol=1e-3)
    assert jax.device_count() >= 8


def test_a_hint_that_makes_a_row_too_long_leaves_the_call_without_a_teacher():
    item = dataclasses.replace(sequence([1, END], [3]), rollout=0, teacher_coef=1.0)
    hinted = {(0, (1, END)): (1, *range(20, 40), END)}
    asked = with_hints([item], hinted)
    scores = scores_of(SHAPE, asked)
    assert scores == [None]
    (left,) = with_scores(asked, scores)
    assert (left.teacher_coef, left.teacher_scores) == (0.0, None)
