"""Tests of the generated sums: correct, reproducible, with different numbers in each split."""

import re

from coded import raises_coded
from data.sums import load_sums

from lightning_jax.train.config import DataConfig
from lightning_jax.train.task_files import DatasetError


def _numbers(task: dict) -> tuple[int, int]:
    found = re.fullmatch(r"What is (\d+) \+ (\d+)\?", task["question"])
    assert found
    return int(found[1]), int(found[2])


def test_the_answers_are_right_and_the_splits_share_no_pair() -> None:
    splits = {split: load_sums(None, split, DataConfig(), "")[0] for split in ("train", "dev")}
    assert [len(tasks) for tasks in splits.values()] == [168, 42]
    pairs = {name: {frozenset(_numbers(task)) for task in tasks} for name, tasks in splits.items()}
    assert len(pairs["train"] | pairs["dev"]) == 20 * 21 // 2
    for task in splits["train"] + splits["dev"]:
        assert sum(_numbers(task)) == task["answer"]
    assert len({task["id"] for task in splits["train"]}) == 168


def test_they_are_always_the_same_and_left_out_ones_are_counted() -> None:
    tasks, dropped = load_sums(None, "train", DataConfig(max_train_tasks=10), "")
    assert (tasks, dropped) == load_sums(None, "train", DataConfig(max_train_tasks=10), "")
    assert (len(tasks), dropped) == (10, {"over_max_train_tasks": 158})


def test_they_are_not_read_from_a_folder() -> None:
    with raises_coded(DatasetError, "unsupported", "data.root"):
        load_sums("/data", "train", DataConfig(), "")
