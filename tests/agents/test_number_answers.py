"""Tests of number extraction and comparison on hand-made cases."""

import pytest
from number_answers import baselines, score


@pytest.mark.parametrize(
    "gold, reply",
    [
        ("72", "The answer is 72."),
        ("72", "The answer is 72.0"),
        ("72", "It is 72 apples"),
        ("72", "The answer is 72 apples for 3 children."),
        ("72", "First 12, then 60. The answer is 72"),
        ("72", "#### 72"),
        ("72", "<result>72</result>"),
        ("72", "**Answer:** 72"),
        ("7", "The answer is 3 + 4 = 7."),
        ("7", "The answer is 7, not 8."),
        ("7", "Is the answer 8? No. The answer is 7."),
        ("40", "The answer for the 5 children is 40."),
        ("36", "So the answer to 12 x 3 is 36."),
        ("40", "Result after 3 days: 40"),
        ("40", "5 + 35 = 40. The result of 5 + 35 is 40."),
        # Calc-X writes "_" in thousands and in mixed numbers.
        ("3_900", "3900"),
        ("3_900", "The answer is 3,900."),
        ("3900", "<result>3_900</result>"),
        ("4_000/3", "1333.33"),
        ("3_1/2", "3.5"),
        ("1234.5", "The answer is $1,234.50 per week."),
        ("1000000", "1e6"),
        ("0.2", "$.20"),
        ("-7", "The answer is -7"),
        ("-7", "The answer is \u22127 degrees"),
        ("-7", "The answer is -$7"),
        ("5", "10-5"),
        # Fractions and mixed numbers.
        ("2/3", "The answer is 2/3."),
        ("2/3", "0.6667"),
        ("2/3 = around 0.666667", "0.667"),
        ("0.33333333333333334", "1/3"),
        ("0.33333333333333334", "0.33"),
        ("3.5", "3 1/2 cups"),
        ("-1.5", "-1 1/2"),
        # Percent: 50% may mean 50 or 0.5.
        ("50", "50%"),
        ("0.5", "50 percent"),
        ("50%", "0.5"),
        ("0.5", "0.5%"),  # a "what percent" question with the gold number 0.5
        ("50%", "50 %"),
        ("12 km", "12"),
        ("1/2", "The answer is 1/2 = 0.5 = 50%."),
        ("0.5", "1/2"),
        ("0.5", "5e-1"),
        # Units, currencies and separators.
        ("3", "The answer is 3 apples."),
        ("3.5", "$3.50"),
        ("3.5", "\\$3.50"),
        ("-3", "-\u20b93"),
        ("1000", "1,000"),
        ("1000", "1{,}000"),
        ("1000000", "1\u202f000\u00a0000"),
        ("3900", "\uff13\uff0c\uff19\uff10\uff10"),  # full width
        # Signs: a dash after "answer" and the dash of a list item are no minus.
        ("0", "-0"),
        ("0", "The answer is -0.0"),
        ("-7", "The answer is \u20137"),
        ("-7", "The answer is - 7"),
        ("72", "Answer - 72"),
        ("72", "Answer \u2014 72 apples"),
        ("72", "The answer is:\n\n- 72 apples"),
        # LaTeX, and characters that are a fraction.
        ("72", r"The answer is \(\boxed{72}\)."),
        ("1/2", r"\boxed{\frac{1}{2}}"),
        ("-1/2", r"The answer is $-\dfrac{1}{2}$."),
        ("3.5", r"3\frac{1}{2}"),
        ("0.5", r"50\%"),
        ("0.5", "The answer is \u00bd."),
        ("3.5", "3\u00bd cups"),
        ("-1.25", "-1 \u00bc"),
        ("50", "50\uff05"),
        # Rounded to within Calc-X's 1 percent.
        ("33.333333", "33.3"),
        ("33.333333", "33"),
        ("0.125", "0.13"),
        ("100/3", "The answer is about 33.3."),
        ("72", "The answer is 71.9999"),
        ("72", "71.6"),
    ],
)
def test_right_answers(gold: str, reply: str) -> None:
    assert score(gold, reply)["reward"] == 1.0


@pytest.mark.parametrize(
    "gold, reply",
    [
        ("72", ""),
        ("72", "The answer is unknown."),
        ("72", "The answer is 73."),
        ("72", "72 or so. The answer is 71."),
        ("72", "The answer is -72"),
        ("72", "7 2"),
        ("72", "172"),
        ("72", "720"),
        ("10000", "10001"),  # within 1 percent, but another integer
        ("100", "101"),
        ("100", "99.4"),  # rounds to another integer
        ("0", "0.001"),
        ("3", "-3 apples"),
        ("0.5", "The answer is half."),
        ("72", r"\boxed{}"),
        ("0.5", r"\frac{2}{1}"),
        ("10000", "10000.5"),
        ("2/3", "0.6"),
        ("2/3", "3/2"),
        ("0.5", "0.52"),
        ("1.05", "1.5"),
        ("50%", "0.5%"),
        ("100", "1,00"),
        ("5", "5/0"),
        ("3_900", "3"),
        ("900", "3_900"),
        ("5", "9" * 5000),  # more digits than Python parses
        ("5", "The answer is 1/" + "9" * 5000),
    ],
)
def test_wrong_answers(gold: str, reply: str) -> None:
    assert score(gold, reply)["reward"] == 0.0


@pytest.mark.parametrize(
    "gold, reply, expected",
    [
        ("100", "101", 1.0),  # 1 / 101 is below 1 percent of the larger number
        ("100", "99", 1.0),
        ("100", "102", 0.0),
        ("10000", "The answer is 10001.", 1.0),
        ("0.33333333333333334", "0.33", 1.0),
        ("2/3", "0.67", 1.0),
        ("0.125", "0.13", 0.0),  # 4 percent off, though rounded
        ("0.5", "50%", 0.0),  # read as 50
        ("50%", "50 %", 1.0),
        ("0", "-0", 1.0),
        ("0", "0.001", 0.0),
        ("5", "1e999", 0.0),
        ("1e999", "1e999", 0.0),  # larger than a float
        ("5", "", 0.0),
    ],
)
def test_result_accuracy_is_the_published_equality(gold: str, reply: str, expected: float) -> None:
    assert score(gold, reply)["result_accuracy"] == expected


def test_the_reward_accepts_what_it_accepted_before() -> None:
    # Up to now a ten-thousandth and, for an integer, a hundredth were allowed.
    for gold, reply in [("72", "72.007"), ("100000", "100000.009"), ("0.51", "0.51005")]:
        assert score(gold, reply)["reward"] == 1.0


def test_baselines_by_hand() -> None:
    tasks = [
        {"question": "9 birds, 4 fly away. How many stay?", "result": "5"},  # 9 - 4
        {"question": "3 and 1,000 and 20?", "result": "980"},  # 1000 - 20
        {"question": "\u00bd and \u00bd?", "result": "1"},  # the sum
        {"question": "How many legs has a spider and how many 2 people?", "result": "5"},
    ]
    assert baselines(tasks) == {
        "constant": 0.5, "first_difference": 0.25, "last_difference": 0.5, "sum": 0.25
    }  # fmt: skip
    assert set(baselines([]).values()) == {0.0}


def test_a_task_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="'none of these'"):
        score("none of these", "5")


def test_a_long_reply_is_read_in_time() -> None:
    for reply in (
        "1" * 50_000 + " " * 50_000 + "answer " * 5_000 + "7",
        "7 " + "answer " * 10_000,  # once took minutes
        "\\frac{" * 20_000 + "\n" + " - " * 20_000 + "is 7",
        "answer" + " " * 50_000 + "-" * 50_000 + " is 7",
    ):
        assert score("7", reply)["reward"] == 1.0
