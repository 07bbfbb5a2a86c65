"""Tests of number extraction and comparison on hand-made cases."""

import pytest
from number_answers import reward


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
    ],
)
def test_right_answers(gold: str, reply: str) -> None:
    assert reward(gold, reply) == 1.0


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
        ("10000", "10001"),  # within a ten-thousandth, but another integer
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
    assert reward(gold, reply) == 0.0


def test_a_task_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="'none of these'"):
        reward("none of these", "5")


def test_a_long_reply_is_read_in_time() -> None:
    assert reward("7", "1" * 50_000 + " " * 50_000 + "answer " * 5_000 + "7") == 1.0
    assert reward("7", "7 " + "answer " * 10_000) == 1.0  # once took minutes
