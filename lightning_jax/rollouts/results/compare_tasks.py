"""Comparison of two results task by task, with a sign test. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Rewards = Mapping[str, Sequence[float]]  # task id to its measured rewards


@dataclass(frozen=True)
class TaskChange:
    """Mean rewards of one task in two results."""

    task_id: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class TaskComparison:
    """Differences between two results on the tasks that both measured.

    The standard error is that of the mean change. It is much smaller than those of the two means
    if most tasks have the same result in both. The mean and its error are None without a common
    task.
    """

    changes: tuple[TaskChange, ...]  # largest magnitude first
    num_only_before: int  # tasks that only the first result measured
    num_only_after: int
    num_won: int  # tasks with a higher reward in the second result
    num_lost: int
    num_equal: int
    change_mean: float | None
    change_stderr: float | None
    p_value: float  # of the sign test: probability of so uneven a split without a difference


def compare_tasks(before: Rewards, after: Rewards) -> TaskComparison:
    """Compare the mean rewards of each task. A task without a reward counts as not measured."""
    old, new = _means(before), _means(after)
    changes = [TaskChange(task, old[task], new[task]) for task in old if task in new]
    changes.sort(key=lambda change: -abs(change.change))
    num_equal = sum(_is_equal(change) for change in changes)
    num_won = sum(change.change > 0 and not _is_equal(change) for change in changes)
    num_lost = len(changes) - num_equal - num_won
    values = np.asarray([change.change for change in changes])
    return TaskComparison(
        changes=tuple(changes),
        num_only_before=len(old) - len(changes),
        num_only_after=len(new) - len(changes),
        num_won=num_won,
        num_lost=num_lost,
        num_equal=num_equal,
        change_mean=float(values.mean()) if changes else None,
        change_stderr=standard_error(values) if changes else None,
        p_value=sign_test(num_won, num_lost),
    )


def sign_test(num_won: int, num_lost: int) -> float:
    """Return the exact two-sided p-value of the sign test: won and lost are equally likely.

    Equal tasks say nothing about the direction and are left out. 1 if all tasks are equal.
    """
    total = num_won + num_lost
    tail = sum(math.comb(total, k) for k in range(min(num_won, num_lost) + 1))
    return min(2 * tail / 2**total, 1.0)


def standard_error(values: Float[np.ndarray, " N"]) -> float:
    """Return the standard error of the mean of at least one value; 0 for a single value."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def _means(rewards: Rewards) -> dict[str, float]:
    return {
        task: math.fsum(values) / len(values) for task, values in rewards.items() if len(values)
    }


def _is_equal(change: TaskChange) -> bool:
    """Return True for equal means, up to the rounding of means of different sizes."""
    return math.isclose(change.before, change.after, rel_tol=1e-9, abs_tol=1e-12)
