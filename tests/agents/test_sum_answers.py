"""Tests of which replies have the right form, and of their rewards."""

import pytest
from sum_answers import answer_of, baselines, reward


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Answer: 42", 42),
        ("**Answer:** 42.", 42),
        ("17 + 25 = 42\nanswer: -3 \n", -3),
        ("Answer: 1\nAnswer: 2", 2),
        ("Answer: 42.5", None),
        ("Answer: 1,000", None),
        ("Answer: NUMBER", None),
        ("The answer: 42", None),  # not at the start of its line
        ("Answer: " + "9" * 5000, None),
        ("42", None),
        ("", None),
    ],
)
def test_an_answer_is_a_line(reply: str, answer: int | None) -> None:
    assert answer_of(reply) == answer


def test_the_form_alone_earns_a_little() -> None:
    task = {"question": "What is 17 + 25?", "answer": 42}
    rewards = [reward(task, reply) for reply in ("Answer: 42", "Answer: 41", "42")]
    assert rewards == [1.0, 0.1, 0.0]


def test_the_constant_baseline_is_the_most_frequent_sum() -> None:
    assert baselines([{"answer": 4}, {"answer": 4}, {"answer": 5}]) == {
        "constant": pytest.approx((1 + 1 + 0.1) / 3)
    }
    assert baselines([]) == {"constant": 0.0}
