"""Scores of rollouts of agents/spider_sql.py, for `rewards` and `lightning-jax rescore`."""

import itertools
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # missing when this file is loaded by path
from spider_sql import CHECK, REWRITE, tidy
from sqlite_sandbox import extract_sql, score


def reward_of_attempt(task: dict[str, Any], attempt: Any) -> float:
    """Return the reward of the last query of a rollout."""
    return score(task, last_query(attempt))["reward"]


def execution_accuracy_of_attempt(task: dict[str, Any], attempt: Any) -> float:
    """Return 1.0 if Spider's own evaluation accepts the last query of a rollout, else 0.0."""
    return score(task, last_query(attempt))["execution_accuracy"]


def likeness_of_attempt(task: dict[str, Any], attempt: Any) -> float:
    """Return how like the gold query the last query of a rollout is: 1.0 if word for word.

    It is the Jaccard index of their pairs of neighboring words, as in the n-gram reward of
    Pourreza et al., arXiv 2503.23157. Attempts that all return wrong results differ in it.
    """
    gold, written = _pairs(task["query"]), _pairs(last_query(attempt))
    return len(gold & written) / len(gold | written)


def _pairs(sql: str) -> set[tuple[str, str]]:
    """Return the pairs of neighboring words and signs, with the start and the end as words."""
    words = ["", *re.findall(r"\w+|[^\w\s]", tidy(sql).lower()), ""]
    return set(itertools.pairwise(words))


def last_query(attempt: Any) -> str:
    """Return the last reply that is no verdict, as SQL."""
    sql, is_verdict = "", False
    for message in attempt.transcript:
        text = message["content"]
        if message["role"] == "user":
            is_verdict = text.rfind(CHECK) > text.rfind(REWRITE)
        if not is_verdict:  # an empty reply is not in the transcript, so a request clears the query
            sql = extract_sql(text) if message["role"] == "assistant" else ""
    return sql
