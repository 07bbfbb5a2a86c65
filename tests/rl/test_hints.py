"""Tests of hints in the prompts that a teacher reads, by hand."""

import dataclasses

import jax
import numpy as np
from test_distill import SHAPE, TEACHER, alone, assert_same_scores, scores_alone, scores_of

from lightning_jax.models.config import MeshConfig
from lightning_jax.rl.distill import (
    hint_positions,
    insert_hints,
    weigh_teacher,
    with_hints,
    with_scores,
)
from lightning_jax.testing.records import sequence

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
