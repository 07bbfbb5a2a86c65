"""Tests of both layouts of Spider: small ones, broken ones, and the real files if present."""

import gzip
import io
import json
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded
from spider import load_spider, schema_text

from lightning_jax.train.tasks.record_files import DatasetError

REAL = Path(__file__).parents[4] / "shared" / "data" / "spider"

SCHEMA = {
    "db_id": "pets",
    "table_names_original": ["owner", "pet", "sqlite_sequence"],
    "column_names_original": [
        *([-1, "*"], [0, "owner_id"], [0, "Home Town"]),
        *([1, "pet_id"], [1, "From"], [1, "owner_id"], [2, "name"]),
    ],
    "foreign_keys": [[5, 1]],
}
SCHEMA_TEXT = (
    'owner(owner_id, "Home Town")\npet(pet_id, "From", owner_id)\nKeys: pet.owner_id=owner.owner_id'
)
QUESTIONS = [
    {"db_id": "pets", "question": "How many pets?", "query": "SELECT count(*) FROM pet"},
    {"db_id": "pets", "question": "Which towns?", "query": 'SELECT "Home Town" FROM owner'},
    {"db_id": "pets", "question": "Which old?", "query": "SELECT pet_id FROM pet WHERE pet_id > 9"},
    {"db_id": "pets", "question": "Which new?", "query": "SELECT pet_id FROM pet WHERE pet_id < 9"},
]
load_all = partial(load_spider, require_rows=False)


def _database(folder: Path) -> Path:
    path = folder / "database" / "pets" / "pets.sqlite"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            """
            CREATE TABLE owner (owner_id INTEGER PRIMARY KEY, "Home Town" TEXT);
            CREATE TABLE pet (pet_id INTEGER PRIMARY KEY, "From" TEXT, owner_id INTEGER);
            INSERT INTO owner VALUES (1, CAST(x'4de4' AS TEXT));
            INSERT INTO pet VALUES (1, 'Oslo', 1), (2, 'Rome', 1);
            """
        )
    return path


def _jsonl(path: Path, rows: list[Any]) -> None:
    with gzip.open(path, "wt") as out:
        out.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    root = tmp_path / "published"
    root.mkdir()
    _database(root)
    (root / "train_spider.json").write_text(json.dumps(QUESTIONS, indent=1))
    (root / "train_others.json").write_text(json.dumps(QUESTIONS[:1]))
    (root / "dev.json").write_text(json.dumps(QUESTIONS[:2]))
    (root / "tables.json").write_text(json.dumps([SCHEMA]))
    return root


@pytest.fixture
def compact(tmp_path: Path) -> Path:
    root, build = tmp_path / "compact", tmp_path / "build"
    root.mkdir()
    _database(build)
    rows = [row | {"id": f"q{i}", "n_rows": i} for i, row in enumerate(QUESTIONS)]
    _jsonl(root / "train.jsonl.gz", rows)
    _jsonl(root / "tables.jsonl.gz", [SCHEMA])
    with tarfile.open(root / "databases_train.tar.gz", "w:gz") as tar:
        tar.add(build / "database", "database")
    return root


def test_published_layout(published: Path, tmp_path: Path) -> None:
    tasks, dropped = load_all(published, "train", tmp_path / "cache")
    assert dropped == {}
    assert [task["id"] for task in tasks] == [f"spider_train_{i:05d}" for i in range(5)]
    path = published / "database" / "pets" / "pets.sqlite"
    expected = {"id": "spider_train_00000", "db_path": str(path), "schema": SCHEMA_TEXT}
    assert tasks[0] == QUESTIONS[0] | expected
    assert len(load_all(published, "dev", tmp_path)[0]) == 2
    (published / "train_others.json").unlink()  # optional
    assert len(load_all(published, "train", tmp_path)[0]) == 4


def test_compact_layout_is_unpacked_once(compact: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    tasks, dropped = load_all(compact, "train", cache)
    assert (len(tasks), dropped) == (4, {})
    assert tasks[3]["id"] == "q3" and tasks[3]["n_rows"] == 3 and tasks[3]["schema"] == SCHEMA_TEXT
    path = Path(tasks[0]["db_path"])
    assert path.is_absolute() and path.is_relative_to(cache)
    (unpacked,) = cache.iterdir()  # no partial directory next to it
    before = path.stat().st_mtime_ns, path.stat().st_ino
    assert load_all(compact, "train", cache)[0] == tasks
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    assert list(cache.iterdir()) == [unpacked]


def test_what_is_left_out_is_counted(published: Path, compact: Path, tmp_path: Path) -> None:
    broken = {"db_id": "pets", "question": "What?", "query": "SELECT nothing FROM pet"}
    (published / "train_others.json").write_text(json.dumps([broken]))
    tasks, dropped = load_spider(published, "train", tmp_path)
    assert [task["id"][-1] for task in tasks] == ["0", "1", "3"]
    assert dropped == {"gold_returns_no_row": 1, "gold_fails": 1}
    # The compact files give the number of rows: 0 for the first task.
    tasks, dropped = load_spider(compact, "train", tmp_path)
    assert dropped == {"gold_returns_no_row": 1}
    assert [task["id"] for task in tasks] == ["q1", "q2", "q3"]


def test_long_schemas_are_left_out(published: Path, tmp_path: Path) -> None:
    load = partial(load_all, published, "dev", tmp_path)
    assert len(load(max_schema_chars=len(SCHEMA_TEXT))[0]) == 2
    assert load(max_schema_chars=len(SCHEMA_TEXT) - 1) == ([], {"schema_too_long": 2})


def _rows(change: Callable[[list[Any]], object]) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        rows: list[Any] = [dict(row) for row in QUESTIONS]
        change(rows)
        _jsonl(root / "train.jsonl.gz", rows)

    return write


@pytest.mark.parametrize(
    "spoil, reason, key, location",
    [
        (_rows(lambda rows: rows.insert(2, "{not json")), "malformed", None, "train.jsonl.gz:3"),
        (_rows(lambda rows: rows.insert(1, ["list"])), "wrong_type", None, "train.jsonl.gz:2"),
        (_rows(lambda rows: rows[1].pop("query")), "invalid", "query", "train.jsonl.gz:2"),
        (_rows(lambda rows: rows[3].update(question=7)), "invalid", "question", "gz:4"),
        (_rows(lambda rows: rows[0].update(db_id="x")), "unknown", "db_id", "gz:1"),
        (
            lambda root: (root / "train.jsonl.gz").write_bytes(b"x"),
            *("unreadable", None, "train.jsonl.gz"),
        ),
        (lambda root: (root / "tables.jsonl.gz").unlink(), "not_found", None, "tables.jsonl.gz"),
        (
            lambda root: _jsonl(root / "tables.jsonl.gz", [{"db_id": "pets"}]),
            *("malformed", "pets", "tables.jsonl.gz:1"),
        ),
        (lambda root: (root / "databases_train.tar.gz").unlink(), "unreadable", None, "tar.gz"),
        (
            lambda root: (root / "databases_train.tar.gz").write_bytes(b"x"),
            *("malformed", None, "tar.gz"),
        ),
        (
            lambda root: (root / "train.jsonl.gz").unlink(),
            *("not_found", "data.root", "train.jsonl.gz"),
        ),
    ],
)
def test_broken_input_is_one_sentence(
    compact: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    reason: str,
    key: str | None,
    location: str,
) -> None:
    spoil(compact)
    cache = tmp_path / "cache"
    with raises_coded(DatasetError, reason, key) as caught:
        load_all(compact, "train", cache)
    assert location in str(caught.value) and "\n" not in str(caught.value)
    assert not [path for path in cache.glob(".*") if path.is_dir()]  # no partial directory


def test_a_broken_archive_leaves_nothing(compact: Path, tmp_path: Path) -> None:
    archive = compact / "databases_train.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-200])
    with raises_coded(DatasetError, "malformed", f"{compact}/databases_train.tar.gz"):
        load_all(compact, "train", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def _link() -> tarfile.TarInfo:
    link = tarfile.TarInfo("database/pets")
    link.type, link.linkname = tarfile.SYMTYPE, "../../.."
    return link


@pytest.mark.parametrize("member", [tarfile.TarInfo("../../escaped"), _link()])
def test_an_archive_cannot_write_outside_its_directory(
    compact: Path, tmp_path: Path, member: tarfile.TarInfo
) -> None:
    with tarfile.open(compact / "databases_train.tar.gz", "w:gz") as tar:
        tar.addfile(member, io.BytesIO())
        tar.addfile(tarfile.TarInfo("database/pets/escaped"), io.BytesIO())
    with raises_coded(DatasetError, "malformed", f"{compact}/databases_train.tar.gz"):
        load_all(compact, "train", tmp_path / "a" / "cache")
    assert not list(tmp_path.rglob("escaped"))


def test_a_missing_database_or_root_is_named(published: Path, tmp_path: Path) -> None:
    database = published / "database" / "pets" / "pets.sqlite"
    database.unlink()
    with raises_coded(DatasetError, "not_found", str(database)) as caught:
        load_all(published, "dev", tmp_path)
    assert "dev.json: item 1" in str(caught.value)
    with raises_coded(DatasetError, "not_a_directory", "data.root") as caught:
        load_all(tmp_path / "no", "dev", tmp_path)
    assert str(tmp_path / "no") in str(caught.value)


def test_a_cache_that_cannot_be_written(compact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_coded(DatasetError, "not_writable"):
        load_all(compact, "train", tmp_path / "file")


def test_schema_text() -> None:
    assert schema_text(SCHEMA) == SCHEMA_TEXT
    assert "Keys" not in schema_text(SCHEMA | {"foreign_keys": []})


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real files in ../shared/data/spider")
@pytest.mark.parametrize("split, size, without_rows", [("train", 6639, 155), ("dev", 659, 41)])
def test_real_files(tmp_path: Path, split: str, size: int, without_rows: int) -> None:
    tasks, dropped = load_spider(REAL, split, tmp_path)
    assert len(tasks) == size - without_rows
    assert dropped == {"gold_returns_no_row": without_rows}
    for task in tasks[:: len(tasks) // 40]:
        with closing(sqlite3.connect(f"file:{task['db_path']}?mode=ro", uri=True)) as db:
            db.text_factory = bytes
            assert len(db.execute(task["query"]).fetchall()) == task["n_rows"]
