"""Split of tasks that come without one."""

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

DEV_SHARE = 0.2


def indices_of(split: str, number: int) -> list[int]:
    """Return which of `number` tasks are in the split, in order. A fixed fifth is dev."""
    num_dev = min(max(1, int(DEV_SHARE * number)), number)
    dev = set(random.Random(0).sample(range(number), num_dev))
    return [index for index in range(number) if (index in dev) == (split == "dev")]


def part_of(split: str, tasks: Sequence[Item]) -> list[Item]:
    """Return the tasks of the split, in order."""
    return [tasks[index] for index in indices_of(split, len(tasks))]
