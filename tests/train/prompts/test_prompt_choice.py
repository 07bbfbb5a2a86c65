"""Tests of the choice between the prompts in use and the best of a search, in simulated searches.

A simulated search has the numbers of tasks of the default settings and no model: whether a prompt
solves a task is a coin toss. It reads and proposes as GEPA does.
"""

import random
from collections.abc import Sequence

import pytest
from coded import raises_coded

from lightning_jax.rollouts.config import PromptSearchConfig
from lightning_jax.rollouts.results.compare_tasks import compare_tasks
from lightning_jax.settings import ConfigError
from lightning_jax.train.prompts.choice import choose_tasks, halves, one_sided_p, replaces
from lightning_jax.types import Task

SEARCH = PromptSearchConfig()
TASKS: list[Task] = [{"id": f"t{number}"} for number in range(300)]
NUM_SEARCHES = 800


def won(wins: int, losses: int, ties: int = 0):
    """Return a comparison in which the new prompts win and lose so many tasks."""
    outcomes = [(0.0, 1.0)] * wins + [(1.0, 0.0)] * losses + [(1.0, 1.0)] * ties
    before, after = ({str(i): [pair[k]] for i, pair in enumerate(outcomes)} for k in (0, 1))
    return compare_tasks(before, after)


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(3, 0, 1 / 8), (2, 0, 1 / 4), (3, 1, 5 / 16), (0, 3, 1.0), (4, 1, 6 / 32), (5, 1, 7 / 64)],
)
def test_the_sign_test_by_hand(wins: int, losses: int, p: float):
    assert one_sided_p(won(wins, losses, ties=7)) == pytest.approx(p)
    assert replaces(won(wins, losses), is_last=True) == (p <= 0.18)


def test_a_prompt_that_is_not_ahead_halfway_is_given_up():
    assert replaces(won(5, 5), is_last=False) is False
    assert replaces(won(0, 0, ties=9), is_last=False) is False
    assert replaces(won(6, 5), is_last=False) is None
    assert replaces(won(64, 0), is_last=False) is None


def test_tasks_of_a_search_are_apart():
    found = choose_tasks(TASKS, SEARCH, seed=1)
    sizes = [len(part) for part in (found.train, found.dev, found.fresh)]
    assert sizes == [SEARCH.num_train, SEARCH.num_dev, SEARCH.num_fresh]
    ids = [task["id"] for task in (*found.train, *found.dev, *found.fresh)]
    assert len(set(ids)) == len(ids)
    assert choose_tasks(TASKS, SEARCH, seed=1) == found != choose_tasks(TASKS, SEARCH, seed=2)
    assert len(choose_tasks(TASKS[:50], SEARCH, seed=1).fresh) == 50 - 20
    assert len(choose_tasks(TASKS[:23], SEARCH, seed=1).fresh) == 3
    with raises_coded(ConfigError, "too_few", "prompt_search.num_dev"):
        choose_tasks(TASKS[:22], SEARCH, seed=1)


@pytest.mark.parametrize(("number", "sizes"), [(3, [3]), (4, [3, 1]), (9, [5, 4]), (128, [64, 64])])
def test_fresh_tasks_are_asked_in_halves(number: int, sizes: list[int]):
    parts = halves(TASKS[:number])
    assert [len(part) for part in parts] == sizes
    assert [task for part in parts for task in part] == TASKS[:number]


class Simulation:
    """One search. Proposals solve a task more often than the prompt in use, by `gain`."""

    def __init__(self, seed: int, rate: float, spread: float | None, gain: float):
        self._random, self._gain = random.Random(seed), gain
        drawn = choose_tasks(TASKS, SEARCH, seed)
        self.tasks = drawn
        self._rates = {
            task["id"]: rate
            if spread is None
            else self._random.betavariate(rate * spread, (1 - rate) * spread)
            for task in (*drawn.train, *drawn.dev, *drawn.fresh)
        }

    def rewards(self, tasks: Sequence[Task], *, is_new: bool) -> list[float]:
        gain = self._gain if is_new else 0.0
        return [float(self._random.random() < self._rates[task["id"]] + gain) for task in tasks]

    def finds_a_better_one(self) -> bool:
        """Return whether a proposal earns most on the dev tasks."""
        train, dev, waiting = self.tasks.train, self.tasks.dev, list[Task]()
        tried = [(False, self.rewards(dev, is_new=False))]
        used = len(dev)
        while used < SEARCH.max_rollouts:
            front = [max(column) for column in zip(*(scores for _, scores in tried), strict=True)]
            leads = [
                1e-9 + sum(map(float.__eq__, scores, front)) for _, scores in tried
            ]  # a parent is drawn by the number of tasks on which nothing is better
            (parent,) = self._random.choices(tried, weights=leads)
            if len(waiting) < SEARCH.minibatch:
                waiting = self._random.sample(train, len(train))
            batch = [waiting.pop() for _ in range(SEARCH.minibatch)]
            earned = self.rewards(batch, is_new=parent[0])
            used += len(batch)
            if min(earned) == 1.0:
                continue
            used += len(batch)
            if sum(self.rewards(batch, is_new=True)) > sum(earned):
                tried.append((True, self.rewards(dev, is_new=True)))
                used += len(dev)
        return max(range(len(tried)), key=lambda place: (sum(tried[place][1]), -place)) > 0

    def replaces(self) -> bool:
        """Return whether the fresh tasks agree that a proposal is better."""
        before: dict[str, list[float]] = {}
        after: dict[str, list[float]] = {}
        for part in halves(self.tasks.fresh):
            for is_new, rewards in ((False, before), (True, after)):
                values = self.rewards(part, is_new=is_new)
                rewards |= {task["id"]: [v] for task, v in zip(part, values, strict=True)}
            is_last = len(before) == len(self.tasks.fresh)
            found = replaces(compare_tasks(before, after), is_last=is_last)
            if found is not None:
                return found
        raise AssertionError("the last part decides")


@pytest.mark.parametrize(
    ("rate", "spread"), [(0.5, None), (0.3, None), (0.5, 1.0)], ids=["even", "hard", "uneven"]
)
def test_equal_prompts_are_seldom_exchanged_and_better_ones_mostly(
    rate: float, spread: float | None
):
    shares = {}
    for gain in (0.0, 0.1):
        searches = [Simulation(seed, rate, spread, gain) for seed in range(NUM_SEARCHES)]
        found = [search.finds_a_better_one() for search in searches]
        taken = [
            is_found and search.replaces() for search, is_found in zip(searches, found, strict=True)
        ]
        shares[gain] = sum(found) / NUM_SEARCHES, sum(taken) / NUM_SEARCHES
    assert shares[0.0][0] > 0.4  # without fresh tasks
    assert shares[0.0][1] < 0.10
    assert shares[0.1][1] > 0.5
