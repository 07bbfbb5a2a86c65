"""Tests of the generated set: it is learnable and reproducible."""

import hashlib
import json
import os
import sqlite3
from collections import defaultdict
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from generated_sql import generated_root, write_generated
from spider import load_spider


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def splits(cache: Path) -> dict[str, list[dict[str, Any]]]:
    loaded = {split: load_spider(None, split, cache) for split in ("train", "dev")}
    assert all(dropped == {} for _, dropped in loaded.values())
    return {split: tasks for split, (tasks, _) in loaded.items()}


def _results(tasks: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple]]]:
    """Return the rows of each query, by database."""
    results: dict[str, dict[str, list[tuple]]] = defaultdict(dict)
    for task in tasks:
        with closing(sqlite3.connect(task["db_path"])) as db:
            results[task["db_id"]][task["query"]] = db.execute(task["query"]).fetchall()
    return results


def test_sizes_and_kinds(splits: dict[str, list[dict[str, Any]]]) -> None:
    train, dev = splits["train"], splits["dev"]
    assert len(train) >= 600 and len(dev) >= 120
    databases = [{task["db_id"] for task in tasks} for tasks in (train, dev)]
    assert len(databases[0]) >= 8 and len(databases[1]) >= 2
    assert not databases[0] & databases[1]
    kinds = [{task["kind"] for task in tasks} for tasks in (train, dev)]
    assert kinds[0] == kinds[1] and len(kinds[0]) >= 15
    assert len({task["id"] for task in train + dev}) == len(train + dev)


def test_questions_are_distinct_and_short(splits: dict[str, list[dict[str, Any]]]) -> None:
    for tasks in splits.values():
        assert len({(task["db_id"], task["question"]) for task in tasks}) == len(tasks)
        assert len({(task["db_id"], task["query"]) for task in tasks}) == len(tasks)
    everything = splits["train"] + splits["dev"]
    assert max(len(task["schema"]) for task in everything) <= 240
    assert max(len(task["query"]) for task in everything) <= 100


def test_answers_have_rows_and_differ_between_queries(
    splits: dict[str, list[dict[str, Any]]],
) -> None:
    same = pairs = 0
    for results in _results(splits["train"] + splits["dev"]).values():
        assert all(results.values())
        for one, other in combinations(results.values(), 2):
            pairs += 1
            same += sorted(map(repr, one)) == sorted(map(repr, other))
    assert pairs > 20_000
    assert same / pairs < 0.01


def test_orders_and_extremes_have_one_answer(splits: dict[str, list[dict[str, Any]]]) -> None:
    for task in splits["train"] + splits["dev"]:
        _, _, order = task["query"].partition(" ORDER BY ")
        if not order or order.startswith("count"):
            continue
        column = order.split()[0]
        table = task["query"].split(" FROM ")[1].split()[0]
        with closing(sqlite3.connect(task["db_path"])) as db:
            values = [row[0] for row in db.execute(f"SELECT {column} FROM {table}")]
        assert len(set(values)) == len(values), task


def test_foreign_keys_hold(splits: dict[str, list[dict[str, Any]]]) -> None:
    for path in {task["db_path"] for task in splits["train"] + splits["dev"]}:
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA foreign_key_check").fetchall() == []
            tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            assert len(tables) == 3
            for (table,) in tables:
                links = db.execute(f"PRAGMA foreign_key_list({table})").fetchall()
                rows = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                assert rows >= 10 and len(links) <= 1


def test_it_is_written_once_and_always_the_same(cache: Path, tmp_path: Path) -> None:
    root = generated_root(cache)
    stamp = os.stat(root / "dev.json").st_mtime_ns
    assert generated_root(cache) == root and os.stat(root / "dev.json").st_mtime_ns == stamp
    write_generated(tmp_path)
    files = sorted(p.relative_to(root) for p in root.rglob("*") if p.is_file())
    assert len(files) == 3 + 15
    assert files == sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    for name in files:
        if name.suffix == ".json":
            assert (root / name).read_bytes() == (tmp_path / name).read_bytes()
        else:
            with (
                closing(sqlite3.connect(root / name)) as a,
                closing(sqlite3.connect(tmp_path / name)) as b,
            ):
                assert list(a.iterdump()) == list(b.iterdump())


def test_the_set_is_that_of_its_version(splits: dict[str, list[dict[str, Any]]]) -> None:
    # Results are reported per version: increase VERSION when this changes.
    facts = [[t["id"], t["question"], t["query"]] for t in splits["train"] + splits["dev"]]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    assert digest == "63eddcfe1389d424"


def test_schemas_match_the_databases(splits: dict[str, list[dict[str, Any]]]) -> None:
    for task in {task["db_path"]: task for task in splits["train"]}.values():
        with closing(sqlite3.connect(task["db_path"])) as db:
            for line in task["schema"].splitlines():
                if not line.startswith("Keys"):
                    table, columns = line.rstrip(")").split("(")
                    db.execute(f"SELECT {columns} FROM {table}")
