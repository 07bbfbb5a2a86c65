"""Tests of the scores of stored rollouts."""

import math
from typing import Any

import pytest
from spider_sql import CHECK, REWRITE
from stored_queries import (
    execution_accuracy_of_attempt,
    last_query,
    likeness_of_attempt,
    reward_of_attempt,
)

from lightning_jax.rollouts.rewards.components import Attempt

GOLD = "SELECT name FROM pet WHERE kind = 'dog'"


def attempt(*texts: str) -> Attempt:
    """Return an attempt of which every second message is the user's."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return Attempt("r", tuple(messages))


@pytest.mark.parametrize(
    ("texts", "sql"),
    [
        (("Question", "```sql\nSELECT 1;\n```"), "SELECT 1"),
        (("Question", "SELECT 1", CHECK, "CORRECT"), "SELECT 1"),
        (("Question", "SELECT 1", CHECK, "WRONG", REWRITE, "SELECT 2"), "SELECT 2"),
        (("Question", "SELECT 1", CHECK, "WRONG", REWRITE), ""),
    ],
)
def test_the_last_query_is_no_verdict(texts: tuple[str, ...], sql: str) -> None:
    assert last_query(attempt(*texts)).rstrip("; ") == sql


def test_queries_are_scored_by_their_results(task: dict[str, Any]) -> None:
    for sql, score in ((GOLD, 1.0), ("SELECT name FROM pet", 0.0), ("SELECT nothing", 0.0)):
        assert reward_of_attempt(task, attempt("Question", sql)) == score
        assert execution_accuracy_of_attempt(task, attempt("Question", sql)) == score


@pytest.mark.parametrize(
    ("sql", "likeness"),
    [
        ("select  NAME from pet where kind='dog';", 1.0),
        ("SELECT name FROM pet", 4 / 12),  # 4 of its 5 pairs are among the 11 of the gold query
        ("SELECT", 1 / 12),
        ("", 0.0),
    ],
)
def test_likeness_is_the_share_of_common_pairs(sql: str, likeness: float) -> None:
    found = likeness_of_attempt({"query": GOLD}, attempt("Question", sql))
    assert math.isclose(found, likeness)
