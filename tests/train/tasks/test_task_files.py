"""Tests of a user's tasks: each line is used once or counted, and dev and train are disjoint."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded

from lightning_jax.rollouts.collect import with_ids
from lightning_jax.train.tasks.task_files import DatasetError, load_task_files, read_tasks


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
        (['{"id": 1, "q": 1}', '{"id": "1", "q": 2}'], "duplicate", ["tasks.jsonl:2", "'1'"]),
        (['{"q": ' + "9" * 5000 + "}"], "malformed", ["tasks.jsonl:1"]),
        (['{"q": ' + "[" * 100_000], "malformed", ["tasks.jsonl:1"]),
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


ROWS = [{"q": number} for number in range(4)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
INDENTED = json.dumps(ROWS, indent=2)


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.ndjson",
        "a.JSONL",
        "a.json",
        "a.jsonl.gz",
        "a.json.gz",
        "a.b.ndjson.gz",
        "a.txt",
    ],
)
@pytest.mark.parametrize("text", [LINES, INDENTED, f"\n {LINES}\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_content_says_how_a_file_is_read(
    tmp_path: Path, name: str, text: str, mark: bytes
) -> None:
    path = tmp_path / name
    for data in (mark + text.encode(), gzip.compress(mark + text.encode())):
        path.write_bytes(data)
        found = sorted(_load(path, "train")[0] + _load(path, "dev")[0], key=lambda task: task["id"])
        assert found == [{"id": str(number)} | row for number, row in enumerate(ROWS, 1)]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.csv", b"q,a\nx,1\n", "unsupported"),
        ("a.tsv", b"q\ta\n", "unsupported"),
        ("a.yaml", b"- q: 1\n", "unsupported"),
        ("a", b"hello", "unsupported"),
        ("a.csv.gz", gzip.compress(b"q,a\nx,1\n", mtime=0), "unsupported"),
        ("a.parquet", b"PAR1\x15\x04", "unsupported"),
        ("a.jsonl", b"PAR1\x15\x04", "unsupported"),
        ("a.jsonl", b"PK\x03\x04\x14\0", "unsupported"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\0", "unsupported"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "unsupported"),
        ("a.json", b"<!DOCTYPE html><html>", "unsupported"),
        ("a.jsonl", LINES.encode("utf-16"), "wrong_encoding"),
        ("a.json", INDENTED.encode("utf-16-be"), "wrong_encoding"),
        ("a.json", INDENTED.encode("utf-32"), "wrong_encoding"),
        ("a.jsonl", '{"q": "caf\xe9"}\n'.encode("latin-1"), "wrong_encoding"),
        ("a.jsonl.gz", gzip.compress(LINES.encode() * 99, mtime=0)[:-20], "unreadable"),
        ("a.jsonl.gz", b"x", "unreadable"),
        ("a.jsonl", b"[1]\n", "wrong_type"),
        ("a.json", b'{"data": [{"q": 1}]}', "wrong_type"),
        ("a.json", b'[{"q": 1},\n {"q": 2]', "malformed"),
        ("a.jsonl", b'{"q": 1},\n{"q": 2},\n', "malformed"),
    ],
)
def test_another_kind_of_file_is_called_by_its_name(
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with raises_coded(DatasetError, reason) as caught:
        _load(path, "train")
    assert str(path) in str(caught.value)
    assert ("download it again" in str(caught.value)) == (reason == "unreadable")


def test_a_directory_is_no_file_of_tasks(tmp_path: Path) -> None:
    with raises_coded(DatasetError, "unreadable", str(tmp_path)):
        read_tasks(tmp_path)


def test_a_task_without_an_id_gets_one_that_no_other_has(tmp_path: Path) -> None:
    rows = [{"q": 0}, {"id": "1", "q": 1}, {"id": None, "q": 2}, {"id": "1+", "q": 3}]
    rows += [{"id": float("nan"), "q": 4}, {"id": "", "q": 5}, {"id": 9, "q": 6}]
    path = _write(tmp_path / "tasks.jsonl", *rows)
    ids = [task["id"] for task in read_tasks(path)]
    assert ids == ["1++", "1", "3", "1+", "5", "6", "9"]
    assert [task["id"] for task in with_ids([{"q": 0}, {"id": "0", "q": 1}, {"id": None}])] == [
        "0+",
        "0",
        "2",
    ]


def test_a_folder_without_its_files_names_those_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    with raises_coded(DatasetError, "missing", "train.jsonl") as caught:
        _load(tmp_path, "train")
    assert "train.csv" in str(caught.value)
