"""Tests of the answer score against values worked by hand."""

import pytest
from answer_score import (
    baselines,
    exact_match,
    extract_answer,
    has_format,
    normalize,
    score,
    token_f1,
)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The  Finnish\nMarkka.", "finnish markka"),
        ("A man, an apple & the U.S.A.", "man apple usa"),
        ("another theme", "another theme"),  # articles are whole words
        ("$1.18 trillion", "118 trillion"),
        ("«Åland»", "«åland»"),  # only ASCII punctuation is removed, as in the official script
        ("the", ""),
    ],
)
def test_normalize(text: str, expected: str) -> None:
    assert normalize(text) == expected


def test_f1_by_hand() -> None:
    # 2 of 3 words are among 4 gold ones: precision 2/3, recall 2/4, F1 = 2 * 2 / (3 + 4).
    assert token_f1("University of Oslo", "Royal University of Glasgow") == pytest.approx(4 / 7)
    # "new" is twice in one and once in the other, so it counts once: 2 * 1 / (2 + 2).
    assert token_f1("new new", "new york") == pytest.approx(0.5)
    assert token_f1("Chen Zheng", "chen zheng!") == 1.0
    assert token_f1("Oslo", "Rome") == 0.0
    assert token_f1("", "Rome") == token_f1("the", "Rome") == token_f1("Rome", "the") == 0.0
    assert token_f1("a", "The") == 1.0  # neither has any words


def test_exact_match() -> None:
    assert exact_match("the Finnish markka", "Finnish Markka.") == 1.0
    assert exact_match("Finnish", "Finnish markka") == 0.0


@pytest.mark.parametrize(
    "reply, answer, well_formed",
    [
        ("<answer>Oslo</answer>", "Oslo", True),
        (" <answer> Oslo\n</answer>\n", "Oslo", True),
        ("It is <answer>Oslo</answer>.", "Oslo", False),
        ("<answer>Rome</answer> No. <answer>Oslo</answer>", "Oslo", False),
        ("<answer>Oslo</answer> or <answer>Ro", "Oslo", False),
        ("<answer><answer>Oslo</answer>", "Oslo", False),
        ("<Answer>Oslo</ANSWER>", "Oslo", False),
        ("<answer></answer>", "", False),
        ("<answer>" * 3, "", False),
        # One tag is enough.
        ("</answer><answer>Oslo", "Oslo", False),
        ("It is <answer>Oslo", "Oslo", False),
        ("Oslo</answer>", "Oslo", False),
        ("Oslo", "Oslo", False),
        ("", "", False),
    ],
)
def test_the_answer_in_a_reply(reply: str, answer: str, well_formed: bool) -> None:
    assert extract_answer(reply) == answer
    assert has_format(reply) is well_formed


def test_the_reward_is_nine_parts_f1_and_one_part_format() -> None:
    assert score("<answer>Oslo</answer>", "Oslo") == {
        "reward": pytest.approx(1.0), "em": 1.0, "f1": 1.0, "format": 1.0
    }  # fmt: skip
    assert score("Oslo", "Oslo")["reward"] == pytest.approx(0.9)
    assert score("<answer>Rome</answer>", "Oslo")["reward"] == pytest.approx(0.1)
    half = score("<answer>old Oslo town hall</answer>", "Oslo town")  # 2 * 2 / (4 + 2)
    assert half == {
        "reward": pytest.approx(0.9 * 2 / 3 + 0.1), "em": 0.0, "f1": pytest.approx(2 / 3),
        "format": 1.0,
    }  # fmt: skip


def test_the_best_alias_counts() -> None:
    whole = score("<answer>Clinton</answer>", "Hillary Clinton", ["Clinton", "Hillary"])
    assert whole["em"] == whole["f1"] == 1.0
    # The answer gives 2 * 1 / (1 + 2), more than the alias.
    assert score("Clinton", "Hillary Clinton", ["Hillary"])["f1"] == pytest.approx(2 / 3)
    # The best alias for one measure need not be the best for the other.
    both = score("<answer>City of Oslo</answer>", "Oslo city", ["oslo, city of", "the Oslo"])
    assert (both["em"], both["f1"]) == (0.0, 1.0)


def test_the_published_normalization_is_kept() -> None:
    # Other dashes than "-" and accents count, as in the official script.
    assert score("1914\u20131918", "1914-1918")["em"] == 0.0
    assert score("Sao Paulo", "S\u00e3o Paulo")["f1"] == pytest.approx(0.5)
    assert score("S\u00c3O PAULO", "S\u00e3o Paulo")["em"] == 1.0
    assert score("", "Oslo") == {"reward": 0.0, "em": 0.0, "f1": 0.0, "format": 0.0}


def test_a_reply_that_was_cut_keeps_its_answer() -> None:
    assert score("<answer>University of Glasgow", "University of Glasgow")["f1"] == 1.0


def test_the_constant_baseline_is_the_best_answer() -> None:
    tasks = [
        {"answer": "Oslo", "answer_aliases": []},
        {"answer": "Oslo", "answer_aliases": []},
        {"answer": "Rome", "answer_aliases": ["Oslo city"]},
    ]
    # "Oslo" is right twice, and has F1 2 * 1 / (1 + 2) with the alias.
    assert baselines(tasks) == {"constant": pytest.approx(0.1 + 0.9 * (1 + 1 + 2 / 3) / 3)}
    assert baselines([]) == {"constant": 0.0}
