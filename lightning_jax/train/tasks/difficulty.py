"""Order of training tasks by their difficulty for the policy: those whose attempts differ first.

A group at a task whose attempts all earn the same has no gradient. The variance of one attempt's
reward, p * (1 - p) if it is 1 with probability p and else 0, is a lower bound of what a task can
teach (arXiv 2504.03380; VCRL, arXiv 2509.19803, weighs tasks by it too). It is estimated from
running means of the rewards and their squares, so that no rollout is spent on it.

The order is a pure function of the estimates, the seed and the step. Nothing depends on time.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from lightning_jax.train.config import DifficultyConfig
from lightning_jax.types import Metrics, Rollout, Task


@dataclass(frozen=True)
class Estimate:
    """Results of a task's visits so far. A visit is one group of attempts."""

    mean: float  # exponential average of the visits' mean rewards
    mean_square: float  # and of their means of squared rewards
    num_visits: int
    num_solved: int  # newest visits in a row in which all attempts had the full reward


def after_visit(
    estimate: Estimate | None, rewards: Sequence[float], config: DifficultyConfig
) -> Estimate:
    """Return the estimate after a visit with these rewards, of which there is at least one."""
    is_solved = min(rewards) >= 1.0
    mean, square = fmean(rewards), fmean(reward**2 for reward in rewards)
    if estimate is None:
        return Estimate(mean, square, 1, int(is_solved))
    return Estimate(
        estimate.mean + config.rate * (mean - estimate.mean),
        estimate.mean_square + config.rate * (square - estimate.mean_square),
        estimate.num_visits + 1,
        estimate.num_solved + 1 if is_solved else 0,
    )


def is_left_out(estimate: Estimate | None, config: DifficultyConfig) -> bool:
    """Return True for a task that was solved in enough visits in a row."""
    return bool(config.solved_visits and estimate and estimate.num_solved >= config.solved_visits)


def task_weight(
    estimate: Estimate | None, config: DifficultyConfig, reward_range: float = 1.0
) -> float:
    """Return the weight of a task: 1 if it is unseen or half solved, 0 if it is left out.

    It is the variance of its rewards by the largest one that is possible for rewards of this range,
    but at least `min_weight` for a task that is not left out.
    """
    if estimate is None:
        return 1.0
    if is_left_out(estimate, config):
        return 0.0
    if reward_range == 0.0:  # all rewards so far are equal
        return config.min_weight
    variance = estimate.mean_square - estimate.mean**2
    return max(4.0 * variance / reward_range**2, config.min_weight)


def task_order(weights: Sequence[float], seed: int, step: int) -> list[int]:
    """Return the indices of all tasks in the order in which a step draws them.

    This is sampling by weight without replacement (Efraimidis and Spirakis 2006): an index comes
    first with a probability proportional to its weight, and so on with the rest. Those with weight
    0 come last, in random order.
    """
    uniform = np.random.default_rng([seed, step]).random(len(weights))
    waits = -np.log1p(-uniform)  # exponential; the smallest of waits / weights is the first
    keys = [
        (0, wait / weight) if weight > 0 else (1, wait)
        for wait, weight in zip(waits.tolist(), weights, strict=True)
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)


class DifficultySampler:
    """Training tasks in the order of `task_order`, with the estimates that it depends on.

    `state()` is a JSON object. After `restore` of it the same tasks follow.
    """

    def __init__(self, tasks: Sequence[Task], config: DifficultyConfig, seed: int) -> None:
        self._tasks, self._config, self._seed = tasks, config, seed
        self._estimates: dict[str, Estimate] = {}
        self._shared: dict[str, Estimate] = {}  # by the value of `config.by`, as JSON
        self._value_of = {task["id"]: _value(task, config.by) for task in tasks if config.by}
        self._lowest, self._highest = math.inf, -math.inf  # rewards so far
        self._step, self._drawn = 0, 0  # steps observed, and tasks drawn since
        self._order: list[int] | None = None  # of this step, made when it is needed

    def draw(self, number: int) -> list[Task]:
        """Return the next tasks. Within a step none comes twice before all have come."""
        if self._order is None:
            weights = [self._weight(task["id"]) for task in self._tasks]
            self._order = task_order(weights, self._seed, self._step)
        size = len(self._order)
        places = range(self._drawn, self._drawn + number)
        self._drawn += number
        return [self._tasks[self._order[place % size]] for place in places]

    def observe(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Read the rollouts of a step, go to the next one, and return metrics of all tasks."""
        groups: dict[str, tuple[str, list[float]]] = {}
        for rollout in rollouts:
            if rollout.reward is not None and math.isfinite(rollout.reward):
                _, rewards = groups.setdefault(rollout.group_id, (rollout.task_id, []))
                rewards.append(rollout.reward)
                self._lowest = min(self._lowest, rollout.reward)
                self._highest = max(self._highest, rollout.reward)
        for task_id, rewards in groups.values():
            before = self._estimates.get(task_id)
            self._estimates[task_id] = after_visit(before, rewards, self._config)
            if (value := self._value_of.get(task_id)) is not None:
                before = self._shared.get(value)
                self._shared[value] = after_visit(before, rewards, self._config)
        self._step, self._drawn, self._order = self._step + 1, 0, None
        return self._metrics()

    def state(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "drawn": self._drawn,
            "rewards": [self._lowest, self._highest] if self._estimates else None,
            "estimates": {name: list(astuple(e)) for name, e in self._estimates.items()},
            "shared": {value: list(astuple(e)) for value, e in self._shared.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._step, self._drawn, self._order = state["step"], state["drawn"], None
        rewards = state.get("rewards", (0.0, 1.0))
        self._lowest, self._highest = rewards or (math.inf, -math.inf)
        self._estimates = {name: _estimate(saved) for name, saved in state["estimates"].items()}
        shared = state.get("shared", {})
        self._shared = {value: _estimate(saved) for value, saved in shared.items()}

    def _weight(self, task_id: str) -> float:
        """Return the weight of a task. An unseen one is as difficult as those of equal value."""
        estimate = self._estimates.get(task_id)
        if estimate is None:
            estimate = self._shared.get(self._value_of.get(task_id, ""))
            estimate = estimate and replace(estimate, num_solved=0)  # this one is not left out
        return task_weight(estimate, self._config, max(0.0, self._highest - self._lowest))

    def _metrics(self) -> Metrics:
        estimates = [self._estimates.get(task["id"]) for task in self._tasks]
        seen = [estimate for estimate in estimates if estimate is not None]
        counts = {
            "unseen": len(estimates) - len(seen),
            "unsolved": sum(estimate.mean <= 0.0 for estimate in seen),
            "solved": sum(estimate.num_solved > 0 for estimate in seen),
            "left_out": sum(is_left_out(estimate, self._config) for estimate in seen),
        }
        return {f"rollout/tasks_{name}_share": n / len(estimates) for name, n in counts.items()}


def _estimate(saved: Sequence[Any]) -> Estimate:
    """Read an estimate. Older checkpoints have no squares, and rewards of 0 and 1 are their own."""
    return Estimate(*saved) if len(saved) == 4 else Estimate(saved[0], *saved)


def _value(task: Task, field: str) -> str:
    return json.dumps(task.get(field), sort_keys=True, default=repr)
