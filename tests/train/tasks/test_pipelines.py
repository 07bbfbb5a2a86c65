"""Tests of the resumable task pipeline."""

import json

from coded import raises_coded

from lightning_jax.settings import ConfigError
from lightning_jax.train.tasks.pipelines import TaskIterator, group_tasks


def test_each_pass_has_every_task_once_in_a_new_order() -> None:
    tasks = TaskIterator(list(range(6)), 3, seed=1)
    first, second = next(tasks) + next(tasks), next(tasks) + next(tasks)
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second


def test_the_same_batches_follow_a_restored_state() -> None:
    tasks = TaskIterator(list(range(10)), 4, seed=3)
    next(tasks)
    state = json.loads(json.dumps(tasks.state()))
    expected = [next(tasks) for _ in range(5)]
    again = TaskIterator(list(range(10)), 4, seed=3)
    again.restore(state)
    assert [next(again) for _ in range(5)] == expected
    assert [next(TaskIterator(list(range(10)), 4, seed=4)) for _ in range(5)] != expected


def test_batches_of_one() -> None:
    tasks = TaskIterator(list(range(4)), 1, seed=1)
    next(tasks)
    state = json.loads(json.dumps(tasks.state()))
    rest = [next(tasks) for _ in range(3)]
    assert all(len(batch) == 1 for batch in rest) and len({batch[0] for batch in rest}) == 3
    again = TaskIterator(list(range(4)), 1, seed=1)
    again.restore(state)
    assert [next(again) for _ in range(3)] == rest


def test_no_tasks_is_an_error() -> None:
    tasks = TaskIterator([], 4, seed=0)
    tasks.restore(tasks.state())
    with raises_coded(ConfigError, "empty", "data.root"):
        next(tasks)


def test_groups_share_the_field() -> None:
    tasks = [{"id": i, "db": "ab"[i % 2]} for i in range(5)]
    groups = group_tasks(tasks, "db", 2)
    assert [[task["id"] for task in group] for group in groups] == [[0, 2], [4], [1, 3]]
    lists = [{"id": 0, "db": ["a"]}, {"id": 1, "db": ["b"]}, {"id": 2, "db": ["a"]}]
    assert group_tasks(lists, "db", 2) == [[lists[0], lists[2]], [lists[1]]]
    assert group_tasks(tasks, None, 3) == [tasks[:3], tasks[3:]]
