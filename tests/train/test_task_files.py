"""Tests of a user's tasks: each line is used once or counted, and dev and train are disjoint."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded

from lightning_jax.train.task_files import DatasetError, load_task_files


def _write(path: Path, *tasks: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def _load(root: Path | None, split: str) -> tuple[list[dict], dict[str, int]]:
    return load_task_files(root, split, "")


def test_a_fifth_of_a_single_file_is_dev(tmp_path: Path) -> None:
    file = _write(tmp_path / "tasks.jsonl", *({"question": f"q{i}"} for i in range(10)))
    train, train_left_out = _load(file, "train")
    dev, dev_left_out = _load(file, "dev")
    assert (len(train), train_left_out) == (8, {})
    assert (len(dev), dev_left_out) == (2, {})
    assert sorted(int(task["id"]) for task in train + dev) == list(range(1, 11))
    assert all(task["question"] == f"q{int(task['id']) - 1}" for task in train + dev)
    assert _load(file, "dev") == (dev, dev_left_out)


def test_a_repeated_task_is_on_one_side_only(tmp_path: Path) -> None:
    tasks = [{"id": f"t{i}", "question": f"q{i % 5}"} for i in range(20)]
    file = _write(tmp_path / "tasks.jsonl", *tasks)
    (train, left_out), (dev, dev_left_out) = _load(file, "train"), _load(file, "dev")
    assert (left_out, dev_left_out) == ({"repeated": 15}, {})
    assert sorted(task["id"] for task in train + dev) == ["t0", "t1", "t2", "t3", "t4"]


def test_a_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", {"id": 7, "q": "a"}, {"q": "b"}, {"id": "x", "q": "c"})
    (tmp_path / "dev.json").write_text(json.dumps([{"q": "b", "id": "other"}, {"q": "d"}]))
    assert _load(tmp_path, "train") == (
        [{"id": "7", "q": "a"}, {"id": "x", "q": "c"}],
        {"in_dev": 1},
    )
    assert _load(tmp_path, "dev") == ([{"q": "b", "id": "other"}, {"id": "2", "q": "d"}], {})


def test_a_mark_at_the_files_beginning_is_no_text(tmp_path: Path) -> None:
    """Some Windows programs write a byte order mark."""
    for name, text in (("a.jsonl", '{"q": 1}\r\n{"q": 2}\r\n'), ("a.json", '[{"q": 1}, {"q": 2}]')):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        tasks = _load(path, "train")[0] + _load(path, "dev")[0]
        assert sorted(task["q"] for task in tasks) == [1, 2]


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "tasks.jsonl.gz", "wt") as file:
        file.write('{"q": 1}\n\n{"q": 2}\n')
    assert [len(_load(tmp_path / "tasks.jsonl.gz", split)[0]) for split in ("train", "dev")] == [
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("lines", "reason", "locations"),
    [
        (['{"q": 1}', "[1]"], "wrong_type", ["tasks.jsonl:2"]),
        (['{"q": 1', '{"q": 2}'], "malformed", ["tasks.jsonl:1"]),
        (
            ['{"id": "a", "q": 1}', '{"id": "a", "q": 2}'],
            "duplicate",
            ["tasks.jsonl:2", "'a'", "tasks.jsonl:1"],
        ),
        (['{"id": 2, "q": 1}', '{"q": 2}'], "duplicate", ["tasks.jsonl:2", "'2'"]),
    ],
)
def test_what_cannot_be_used_gets_one_sentence(
    tmp_path: Path, lines: list[str], reason: str, locations: list[str]
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(lines))
    with raises_coded(DatasetError, reason) as caught:
        _load(file, "train")
    assert all(location in str(caught.value) for location in locations)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with raises_coded(DatasetError, "missing", "data.root"):
        _load(None, "train")
    with raises_coded(DatasetError, "not_found", "data.root") as caught:
        _load(tmp_path / "none.jsonl", "train")
    assert "none.jsonl" in str(caught.value)
    _write(tmp_path / "train.jsonl", {"q": 1})
    with raises_coded(DatasetError, "missing", "dev.jsonl"):
        _load(tmp_path, "train")
