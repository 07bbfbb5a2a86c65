"""Tests of the order of tasks by difficulty: weights by hand, shares of draws, exact resuming."""

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_agent
from coded import raises_coded
from toy_runs import TASKS, ahead_config

from lightning_jax.settings import ConfigError, load_config
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config, DataConfig, DifficultyConfig
from lightning_jax.train.loop import trainer
from lightning_jax.train.tasks.difficulty import (
    DifficultySampler,
    Estimate,
    after_visit,
    task_order,
    task_weight,
)
from lightning_jax.types import LLM, Rollout, Task

SETTINGS = DifficultyConfig(rate=0.5, min_weight=0.1, solved_visits=2)


def test_estimates_by_hand():
    first = after_visit(None, [1.0, 0.0, 0.0, 0.0], SETTINGS)
    assert first == Estimate(0.25, 0.25, 1, 0)
    second = after_visit(first, [1.0, 1.0], SETTINGS)  # 0.25 + 0.5 * (1 - 0.25)
    assert second == Estimate(0.625, 0.625, 2, 1)
    assert after_visit(second, [3.0, 1.0], SETTINGS) == Estimate(1.3125, 2.8125, 3, 2)
    assert after_visit(second, [1.0, -2.0], SETTINGS) == Estimate(0.0625, 1.5625, 3, 0)
    assert after_visit(None, [0.5], SETTINGS) == Estimate(0.5, 0.25, 1, 0)


def test_weights_by_hand():
    weights = {
        None: 1.0,
        Estimate(0.5, 0.5, 1, 0): 1.0,
        Estimate(0.25, 0.25, 1, 0): 0.75,  # 4 * 0.25 * 0.75
        Estimate(0.9, 0.9, 4, 0): 0.36,
        Estimate(0.99, 0.99, 9, 1): 0.1,
        Estimate(0.0, 0.0, 5, 0): 0.1,  # never solved, visited at a low rate
        Estimate(0.7, 0.49, 5, 0): 0.1,  # each attempt earns 0.7
        Estimate(0.5, 0.41, 5, 0): 0.64,  # half earn 0.1, half 0.9: 4 * 0.4**2
        Estimate(1.0, 1.0, 1, 1): 0.1,
        Estimate(1.0, 1.0, 2, 2): 0.0,  # solved in two visits in a row
    }
    for estimate, weight in weights.items():
        assert task_weight(estimate, SETTINGS) == pytest.approx(weight)
    never = dataclasses.replace(SETTINGS, solved_visits=0)
    assert task_weight(Estimate(1.0, 1.0, 50, 50), never) == 0.1
    assert task_weight(Estimate(-5.0, 50.0, 2, 0), SETTINGS, 10.0) == pytest.approx(1.0)
    assert task_weight(Estimate(-5.0, 25.0, 2, 0), SETTINGS, 0.0) == 0.1


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (-5.0, 5.0), (0.6, 0.7), (0.0, 300.0)])
def test_groups_differ_more_often_than_with_uniform_draws(low: float, high: float):
    """Play 5 of 40 tasks whose attempts differ, and others that always earn the same."""
    tasks: list[Task] = [{"id": str(number)} for number in range(40)]
    same = low + 0.7 * (high - low)  # a reward for the form alone, say
    sampler, rng = DifficultySampler(tasks, SETTINGS, seed=2), np.random.default_rng(0)
    unequal = drawn = 0
    for step in range(60):
        results: dict[str, list[float | None]] = {}
        for task in sampler.draw(4):
            differs = int(task["id"]) < 5
            results[task["id"]] = [
                (high if rng.random() < 0.5 else low) if differs else same for _ in range(4)
            ]
        sampler.observe(rollouts(results))
        if step >= 20:  # most tasks have been seen
            unequal += sum(len(set(found)) > 1 for found in results.values())
            drawn += len(results)
    assert unequal / drawn > 2 * 5 / 40  # uniform draws give at most 5 of 40


def test_the_first_task_is_drawn_by_its_weight_and_left_out_tasks_come_last():
    weights = [1.0, 0.25, 0.0, 0.75, 0.0]
    orders = [task_order(weights, 7, step) for step in range(4000)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert all({*order[3:]} == {2, 4} for order in orders)
    shares = Counter(order[0] for order in orders)
    expected = {0: 0.5, 1: 0.125, 3: 0.375}
    for index, share in expected.items():
        assert shares[index] / 4000 == pytest.approx(share, abs=0.03)
    # Without replacement: after task 0, tasks 1 and 3 share what is left as 1 to 3.
    seconds = Counter(order[1] for order in orders if order[0] == 0)
    assert seconds[3] / seconds.total() == pytest.approx(0.75, abs=0.04)


def test_an_order_depends_on_nothing_but_weights_seed_and_step():
    assert task_order([1.0] * 9, 1, 2) == task_order([1.0] * 9, 1, 2)
    others = [task_order([1.0] * 9, *key) for key in ((1, 2), (1, 3), (2, 2))]
    assert others[0] != others[1] and others[0] != others[2]
    assert task_order([], 0, 0) == []


def rollouts(rewards: dict[str, list[float | None]]) -> list[Rollout]:
    return [
        Rollout(f"r-{name}-{i}", name, f"g-{name}", "train", 0, i, 1, "scored", reward)
        for name, found in rewards.items()
        for i, reward in enumerate(found)
    ]


def test_metrics_and_the_draws_after_a_step():
    tasks: list[Task] = [{"id": name} for name in "abcde"]
    sampler = DifficultySampler(tasks, dataclasses.replace(SETTINGS, solved_visits=1), seed=3)
    assert {task["id"] for task in sampler.draw(5)} == {*"abcde"}
    assert sampler.draw(1) != []  # more than there are: again from the beginning
    found = sampler.observe(
        rollouts({"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [1.0, 0.0], "d": [None, None]})
    )
    assert found == pytest.approx(
        {
            "rollout/tasks_unseen_share": 0.4,  # d has failed without a reward, e was not drawn
            "rollout/tasks_unsolved_share": 0.2,
            "rollout/tasks_solved_share": 0.2,
            "rollout/tasks_left_out_share": 0.2,
        }
    )
    firsts = Counter()
    for _ in range(60):
        order = [task["id"] for task in sampler.draw(5)]
        assert order[-1] == "a"
        firsts[order[0]] += 1
        sampler.observe([])
    assert firsts["b"] < min(firsts[name] for name in "cde")


def test_the_same_tasks_follow_a_restored_state():
    tasks: list[Task] = [{"id": f"t{i}"} for i in range(20)]
    whole = DifficultySampler(tasks, SETTINGS, seed=5)
    rng, states, drawn = np.random.default_rng(0), [], []
    results = [
        {f"t{i}": [float(rng.random() > 0.5)] for i in rng.integers(20, size=4)} for _ in "123456"
    ]
    for found in results:
        states.append(json.loads(json.dumps(whole.state())))
        drawn.append(whole.draw(3) + whole.draw(1))
        whole.observe(rollouts(found))  # type: ignore[arg-type]
    for step, state in enumerate(states):
        again = DifficultySampler(tasks, SETTINGS, seed=5)
        again.restore(state)
        for expected, found in zip(drawn[step:], results[step:], strict=True):
            assert again.draw(4) == expected
            again.observe(rollouts(found))  # type: ignore[arg-type]
    middle = DifficultySampler(tasks, SETTINGS, seed=5)
    middle.draw(2)
    half = DifficultySampler(tasks, SETTINGS, seed=5)
    half.restore(json.loads(json.dumps(middle.state())))
    assert half.draw(7) == middle.draw(7)


async def by_task(task: Task, llm: LLM) -> float:
    """Call the policy, and solve t0 always, t1 never and the others by chance."""
    chance = await toy_agent.run(task, llm)
    return {"t0": 1.0, "t1": 0.0}.get(task["id"], chance)


def by_difficulty(run_dir: Path, **changes: Any) -> Config:
    data = DataConfig(sampler="difficulty", difficulty=SETTINGS)
    return dataclasses.replace(ahead_config(run_dir), data=data, **changes)


def tasks_of(run_dir: Path) -> list[list[str]]:
    """Return the ids of each step's tasks."""
    store = Store(run_dir / "store.sqlite")
    try:
        found = [store.rollouts(phase="train", step=step) for step in range(6)]
    finally:
        store.close()
    return [sorted({rollout.task_id for rollout in step}) for step in found]


def test_a_run_that_stops_and_resumes_draws_the_same_tasks(tmp_path: Path):
    whole, parted = by_difficulty(tmp_path / "whole"), by_difficulty(tmp_path / "parted")
    rows = asyncio.run(trainer.train(whole, TASKS, TASKS, agent=by_task))
    for num_steps in (1, 3, 6):
        some = dataclasses.replace(parted, num_steps=num_steps)
        again = asyncio.run(trainer.train(some, TASKS, TASKS, agent=by_task))
    assert tasks_of(tmp_path / "whole") == tasks_of(tmp_path / "parted")
    names = ("rollout/tasks_unseen_share", "rollout/tasks_unsolved_share", "rollout/reward_mean")
    for before, after in zip(rows[:6], again[:6], strict=True):
        assert [before[name] for name in names] == pytest.approx([after[name] for name in names])
    assert rows[5]["rollout/tasks_unseen_share"] == 0.0


def test_the_order_by_difficulty_refuses_groups_that_run_ahead():
    settings = ["rollout.ahead=1", "algorithm.correction=truncate", "algorithm.proximal=old"]
    load_config(Config, settings)
    with raises_coded(ConfigError, "conflict", "data.sampler"):
        load_config(Config, [*settings, "data.sampler=difficulty"])
    with raises_coded(ConfigError, "unknown", "data.sampler"):
        load_config(Config, ["data.sampler=hard"])


def by_level(draws: list[Task]) -> Counter[int]:
    return Counter(task["level"] for task in draws)


def test_unseen_tasks_follow_the_pass_rate_of_their_level():
    """Play a policy that solves one level always, one half of the time, and one never."""
    settings = dataclasses.replace(SETTINGS, by="level", solved_visits=0)
    tasks: list[Task] = [{"id": f"{x}-{i}", "level": x} for x in range(4) for i in range(300)]

    def run(rates: dict[int, float], seed: int) -> Counter[int]:
        rng, found = np.random.default_rng(seed), Counter[int]()
        for step in range(40):
            drawn = sampler.draw(8)
            results = {
                t["id"]: [float(rng.random() < rates[t["level"]]) for _ in range(8)] for t in drawn
            }
            sampler.observe(rollouts(results))  # type: ignore[arg-type]
            found += by_level(drawn) if step >= 16 else Counter()
        return found

    sampler = DifficultySampler(tasks, settings, seed=1)
    first = run({0: 1.0, 1: 0.5, 2: 0.0, 3: 0.0}, 0)
    assert first[1] > 0.6 * first.total()
    # The policy improves, and the next level becomes the one that teaches most.
    second = run({0: 1.0, 1: 1.0, 2: 0.5, 3: 0.0}, 1)
    assert second[2] > 0.5 * second.total()  # seen tasks of level 1 keep their old rate
    sampler = DifficultySampler(tasks, dataclasses.replace(settings, by=None), seed=1)
    blind = run({0: 1.0, 1: 0.5, 2: 0.0, 3: 0.0}, 0)
    assert blind[1] < 0.4 * blind.total()  # hardly any task comes twice


def test_a_checkpoint_without_squares_gives_the_weights_that_it_had():
    sampler = DifficultySampler([{"id": "a"}, {"id": "b"}], SETTINGS, seed=0)
    sampler.restore({"step": 3, "drawn": 0, "estimates": {"a": [0.25, 2, 0], "b": [1.0, 1, 1]}})
    assert [sampler._weight(name) for name in "ab"] == pytest.approx([0.75, 0.1])


def test_weights_of_unseen_tasks_by_hand_and_after_a_restart():
    settings = dataclasses.replace(SETTINGS, by="level", solved_visits=1)
    tasks: list[Task] = [{"id": "a", "level": 0}, {"id": "b", "level": 0}, {"id": "c", "level": 1}]
    sampler = DifficultySampler([*tasks, {"id": "d"}], settings, seed=0)
    sampler.observe(rollouts({"a": [1.0, 1.0, 1.0, 0.0]}))
    again = DifficultySampler([*tasks, {"id": "d"}], settings, seed=0)
    again.restore(json.loads(json.dumps(sampler.state())))
    for found in (sampler, again):
        weights = [found._weight(name) for name in "abcd"]
        assert weights == pytest.approx([0.75, 0.75, 1.0, 1.0])
    sampler.observe(rollouts({"a": [1.0, 1.0], "d": [0.0]}))
    # a is left out; b is as its level, 0.75 + 0.5 * 0.25; nothing like d is left.
    weights = [sampler._weight(name) for name in "abcd"]
    assert weights == pytest.approx([0.0, 4 * 0.875 * 0.125, 1.0, 0.1])
