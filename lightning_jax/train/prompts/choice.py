"""Choice between the prompts in use and the best of a search. All functions are pure.

The best of several equal prompts on a few tasks mostly earns more there than the one in use. So
both are asked again, on tasks that the search has not seen, and a sign test decides.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_jax.rollouts.config import PromptSearchConfig
from lightning_jax.rollouts.results.compare_tasks import TaskComparison
from lightning_jax.settings import ConfigError
from lightning_jax.types import Task

# One-sided p-value of the sign test up to which new prompts replace those in use. How often equal
# and better prompts do, with PromptSearchConfig's numbers of tasks, is measured by
# tests/train/prompts/test_prompt_choice.py.
MAX_P = 0.18
MIN_FRESH = 3  # tasks: fewer cannot decide, as the least p-value of 2 is 0.25


@dataclass(frozen=True)
class SearchTasks:
    """Training tasks of one search, without a common one."""

    train: list[Task]  # whose rollouts the proposing model reads
    dev: list[Task]  # which choose the best proposal
    fresh: list[Task]  # which compare it with the prompts in use


def choose_tasks(tasks: Sequence[Task], search: PromptSearchConfig, seed: int) -> SearchTasks:
    """Return the tasks of a search. Fewer than `num_fresh` are fresh if there are no more.

    Raises ConfigError if there are too few for a search.
    """
    needed = search.num_train + search.num_dev + MIN_FRESH
    if len(tasks) < needed:
        raise ConfigError(
            f"a search for prompts needs {needed} training tasks and there are {len(tasks)}; lower "
            "prompt_search.num_train and prompt_search.num_dev.",
            reason="too_few",
            key="prompt_search.num_dev",
        )
    num_tasks = min(search.num_train + search.num_dev + search.num_fresh, len(tasks))
    drawn = random.Random(seed).sample(list(tasks), num_tasks)
    num_seen = search.num_train + search.num_dev
    return SearchTasks(
        drawn[: search.num_train], drawn[search.num_train : num_seen], drawn[num_seen:]
    )


def halves(fresh: Sequence[Task]) -> list[list[Task]]:
    """Return the fresh tasks in two parts. The second is asked if the first leaves a chance."""
    middle = max(MIN_FRESH, (len(fresh) + 1) // 2)
    return [part for part in (list(fresh[:middle]), list(fresh[middle:])) if part]


def replaces(comparison: TaskComparison, *, is_last: bool) -> bool | None:
    """Return whether new prompts replace those in use, or None if the other tasks must tell.

    `is_last` is True if there are no other tasks. New prompts that win on no more tasks than they
    lose have no chance.
    """
    if comparison.num_won <= comparison.num_lost:
        return False
    return one_sided_p(comparison) <= MAX_P if is_last else None


def one_sided_p(comparison: TaskComparison) -> float:
    """Return the probability that one of two equal prompts wins on at least as many tasks."""
    total = comparison.num_won + comparison.num_lost
    return sum(math.comb(total, k) for k in range(comparison.num_won, total + 1)) / 2**total
