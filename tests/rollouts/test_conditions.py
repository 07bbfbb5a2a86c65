"""Tests of conditions on stored attempts: what they mean, and that nothing else is accepted."""

import pytest
from coded import raises_coded

from lightning_jax.rollouts.conditions import MAX_CHARS, parse_condition
from lightning_jax.settings import ConfigError

VALUES = {"reward": 0.95, "calls": 3, "task": "t1", "exact": True}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("reward > 0.9", True),
        ("reward > 0.95", False),
        ("0.9 < reward <= 1", True),
        ("0.9 < reward <= 0.94", False),
        ("reward > 0.9 and calls <= 2", False),
        ("reward > 0.9 and calls <= 2 or task == 't1'", True),
        ("not (reward > 0.9)", False),
        ("reward > -1 and calls != 4", True),
        ("exact == True", True),
        ("absent > 0", False),
        ("not absent > 0", True),
    ],
)
def test_a_condition_means_what_python_means(text: str, holds: bool) -> None:
    assert parse_condition(text).holds(VALUES) is holds


def test_a_condition_knows_the_names_that_it_reads() -> None:
    assert parse_condition("a > 1 and not (b < c)").names == {"a", "b", "c"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reward",
        "1",
        "reward >",
        "reward = 1",
        "reward + 1 > 2",
        "reward > 1 if calls else 2",
        "__import__('os').system('true') == 0",
        "reward.real > 1",
        "values['reward'] > 1",
        "reward in (1, 2)",
        "reward is 1",
        "(lambda: 1)() == 1",
        "reward > None",
        "reward > 1j",
        "reward > 1; calls > 2",
        "reward > 2 ** 99999999",
        "(" * 300 + "reward" + ")" * 300,
        "not " * 240 + "reward",
        "reward > 1" + " " * MAX_CHARS + "and",
        "reward > '\0'",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with raises_coded(ConfigError, "malformed", "--where"):
        parse_condition(text)


def test_a_text_is_not_compared_with_a_number() -> None:
    with raises_coded(ConfigError, "wrong_type", "--where"):
        parse_condition("reward > 'a'").holds(VALUES)
