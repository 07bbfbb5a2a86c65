"""Tests of the generated sums: correct, reproducible, with different numbers in each split."""

import re

from coded import raises_coded
from sums import load_sums

from lightning_jax.train.tasks.record_files import DatasetError


def _numbers(task: dict) -> tuple[int, int]:
    found = re.fullmatch(r"What is (\d+) \+ (\d+)\?", task["question"])
    assert found
    return int(found[1]), int(found[2])


def test_the_answers_are_right_and_the_splits_share_no_pair() -> None:
    splits = {split: load_sums(None, split, "")[0] for split in ("train", "dev")}
    assert [len(tasks) for tasks in splits.values()] == [168, 42]
    pairs = {name: {frozenset(_numbers(task)) for task in tasks} for name, tasks in splits.items()}
    assert len(pairs["train"] | pairs["dev"]) == 20 * 21 // 2
    for task in splits["train"] + splits["dev"]:
        assert sum(_numbers(task)) == task["answer"]
    assert load_sums(None, "train", "") == (splits["train"], {})


def test_they_are_not_read_from_a_folder() -> None:
    with raises_coded(DatasetError, "unsupported", "data.root"):
        load_sums("/data", "train", "")
