"""Tests of the components that score a note."""

import pytest
from note_rewards import complete, follows, novelty, similarity

from lightning_jax.rollouts.rewards.components import Attempt

TASK = {
    "question": "Write one short sentence about a bakery. Use the words warm and early.",
    "topic": "a bakery",
    "words": ["warm", "early"],
}


def attempt(text: str) -> Attempt:
    return Attempt("r", ({"role": "assistant", "content": text},))


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("The bakery opens early. Its bread is Warm!", 1.0),
        ("The bakery opens. It is warmer.", 1 / 3),  # warmer is another word
        ("", 0.0),
    ],
)
def test_words_and_topic_count_once_each(text: str, share: float) -> None:
    assert follows(TASK, attempt(text)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Our bread is always warm... ", 0.0),  # five words
        ("Our bread is always very warm... ", 1.0),
        ("Our bread is warm. We open early!", 0.0),
        ("Our bread is always very warm", 0.0),
        ("warm " * 40 + ".", 1.0),
        ("warm " * 41 + ".", 0.0),
        ("1. 2.", 0.0),
        ("", 0.0),
    ],
)
def test_complete_notes_are_one_whole_sentence(text: str, value: float) -> None:
    assert complete(TASK, attempt(text)) == value


def test_novelty_is_the_share_of_new_ngrams() -> None:
    # "use the words" and "the words warm" are in the request, "words warm bread" is not.
    assert novelty(TASK, attempt("Use the words warm bread.")) == pytest.approx(1 / 3)
    # All four 3-grams are equal, so the first alone is new.
    assert novelty(TASK, attempt("go go go go go go")) == pytest.approx(1 / 4)
    assert novelty(TASK, attempt("Fresh bread smells good")) == 1.0
    assert novelty(TASK, attempt("Fresh bread")) == 0.0


def test_a_note_that_repeats_its_request_is_most_similar() -> None:
    good = similarity(TASK, attempt("The bakery is warm. It opens early."))
    copied = similarity(TASK, attempt(TASK["question"]))
    assert copied == pytest.approx(1.0, abs=1e-5)
    assert 0.2 < good < copied
