"""Tests of the generated requests for notes."""

from pathlib import Path

import pytest
from notes import NUM_DEV, NUM_TRAIN, load_notes

from lightning_jax.train.tasks.record_files import DatasetError


def test_splits_share_no_request_and_are_always_the_same() -> None:
    (train, left_out), (dev, _) = (load_notes(None, split, Path()) for split in ("train", "dev"))
    assert (len(train), len(dev), left_out) == (NUM_TRAIN, NUM_DEV, {})
    keys = [(task["topic"], *sorted(task["words"])) for task in (*train, *dev)]
    assert len(set(keys)) == len(keys)
    assert len({task["id"] for task in (*train, *dev)}) == len(keys)
    assert load_notes(None, "dev", Path())[0] == dev
    assert all(word in task["question"] for task in dev for word in task["words"])


def test_a_data_root_is_refused() -> None:
    with pytest.raises(DatasetError) as caught:
        load_notes("somewhere", "train", Path())
    assert caught.value.key == "data.root"
