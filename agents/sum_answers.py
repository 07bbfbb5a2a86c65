"""Sums of small numbers: the prompt and the reward.

A task is a dict with `question`, such as "What is 17 + 25?", and `answer`, the right number.
"""

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

SYSTEM = "You add numbers. Reply with one line: Answer: NUMBER"
HINT = "That has no line such as: Answer: 12. Reply with one."

_ANSWER = re.compile(r"^\W*Answer\W*:\W*?(-?\d+)(?![\d.,]*\d)", re.I | re.M)


def first_messages(question: str, system: str = SYSTEM) -> list[dict[str, Any]]:
    """Return a conversation with an example, up to the question."""
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "Answer: 5"},
        {"role": "user", "content": question},
    ]


def answer_of(reply: str) -> int | None:
    """Return the number of the reply's last line `Answer: NUMBER`, or None if there is none."""
    numbers = _ANSWER.findall(reply)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 20 else None


def reward(task: dict[str, Any], output: str) -> float:
    """Return 1.0 for the right number, 0.1 for a wrong one, 0.0 for a reply without one."""
    answer = answer_of(output)
    if answer is None:
        return 0.0
    return 1.0 if answer == task["answer"] else 0.1


def baselines(tasks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean reward of the best number that is always the same."""
    if not tasks:
        return {"constant": 0.0}
    number, _ = Counter(task["answer"] for task in tasks).most_common(1)[0]
    return {"constant": fmean(reward(task, f"Answer: {number}") for task in tasks)}
