"""Scores of stored rollouts of agents/spider_sql.py, for `lightning-jax rescore`."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # missing when this file is loaded by path
from spider_sql import CHECK, REWRITE
from sqlite_sandbox import extract_sql, score


def reward_of_attempt(task: dict[str, Any], attempt: Any) -> float:
    """Return the reward of the last query of a rollout."""
    return score(task, last_query(attempt))["reward"]


def execution_accuracy_of_attempt(task: dict[str, Any], attempt: Any) -> float:
    """Return 1.0 if Spider's own evaluation accepts the last query of a rollout, else 0.0."""
    return score(task, last_query(attempt))["execution_accuracy"]


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
