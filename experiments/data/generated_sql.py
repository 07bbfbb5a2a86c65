"""Generated text-to-SQL tasks, in the published layout of Spider.

They serve a first run without data: small databases, short schemas and short queries. Dev questions
have the same kinds as those of train, on other databases. The same code always writes the same set.
No published data is used.
"""

import json
import random
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from dataset_files import make_directory
from generated_domains import WORLDS, Table, World, columns_of
from generated_questions import Question, all_questions

VERSION = 1  # increase when the set changes, so that old cached copies are not read
_PER_DATABASE = {"train": 80, "dev": 60}


def generated_root(cache_dir: Path) -> Path:
    """Return the folder of the generated set, writing it if needed. Raises DatasetError."""
    return make_directory(cache_dir / f"generated-sql-v{VERSION}", write_generated)


def write_generated(folder: Path) -> None:
    """Write train_spider.json, dev.json, tables.json and database/ into the folder."""
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "dev": []}
    for world in WORLDS:
        path = folder / "database" / world.db_id / f"{world.db_id}.sqlite"
        path.parent.mkdir(parents=True)
        with closing(sqlite3.connect(path)) as database:
            _fill(database, world)
            rows[world.split] += _choose(database, world)
    tables = [_schema_record(world) for world in WORLDS]
    for name, records in (
        ("train_spider.json", rows["train"]),
        ("dev.json", rows["dev"]),
        ("tables.json", tables),
    ):
        (folder / name).write_text(json.dumps(records, indent=1))


# ---- Databases -----------------------------------------------------------------------------------


def _fill(database: sqlite3.Connection, world: World) -> None:
    for table in (world.parent, *world.children):
        columns = [f"{name} {kind}" for name, kind in columns_of(world, table)]
        columns[0] += " PRIMARY KEY"
        if table is not world.parent:
            columns[-1] += f" REFERENCES {world.parent.name}({world.parent.name}_id)"
        database.execute(f"CREATE TABLE {table.name} ({', '.join(columns)})")
        marks = ", ".join("?" * len(columns))
        database.executemany(f"INSERT INTO {table.name} VALUES ({marks})", _rows(world, table))
    database.commit()


def _rows(world: World, table: Table) -> list[tuple[Any, ...]]:
    rng = random.Random(f"{world.db_id} {table.name}")
    size = table.num_rows
    labels = rng.sample(table.label[1].split(), size)
    words = table.category[1].split()
    kinds = rng.sample(words, min(len(words), 5))
    # Uneven shares, so that the categories have different counts.
    categories = rng.choices(kinds, weights=range(2, len(kinds) + 2), k=size)
    numbers = [rng.sample(range(low, high + 1), size) for _, low, high in table.numbers]
    columns: list[list[Any]] = [list(range(1, size + 1)), labels, categories, *numbers]
    if table is not world.parent:
        parents = range(1, world.parent.num_rows + 1)
        columns.append(rng.choices(parents, weights=range(1, len(parents) + 1), k=size))
    return list(zip(*columns, strict=True))


def _schema_record(world: World) -> dict[str, Any]:
    """Return the database's entry in tables.json."""
    tables = (world.parent, *world.children)
    names: list[tuple[int, str]] = [(-1, "*")]
    types = ["text"]
    primary, foreign = [], []
    for index, table in enumerate(tables):
        primary.append(len(names))
        for name, kind in columns_of(world, table):
            names.append((index, name))
            types.append("number" if kind == "INTEGER" else "text")
        if index > 0:
            foreign.append((len(names) - 1, primary[0]))
    return {
        "db_id": world.db_id,
        "table_names": [table.name for table in tables],
        "table_names_original": [table.name for table in tables],
        "column_names": [(index, name.replace("_", " ")) for index, name in names],
        "column_names_original": names,
        "column_types": types,
        "primary_keys": primary,
        "foreign_keys": foreign,
    }


# ---- Questions -----------------------------------------------------------------------------------


def _choose(database: sqlite3.Connection, world: World) -> list[dict[str, Any]]:
    """Return the database's tasks: as equal numbers of each kind as possible, shuffled."""
    rng = random.Random(f"questions {world.db_id}")
    kinds: dict[str, list[Question]] = defaultdict(list)
    for question in all_questions(database, world, rng):
        if _is_clear(database, question[2], question[0]):
            kinds[question[0]].append(question)
    for questions in kinds.values():
        rng.shuffle(questions)
    chosen: list[Question] = []
    while len(chosen) < _PER_DATABASE[world.split] and any(kinds.values()):
        chosen += [questions.pop() for questions in kinds.values() if questions]
    chosen = chosen[: _PER_DATABASE[world.split]]
    rng.shuffle(chosen)
    return [
        {
            "id": f"generated_{world.split}_{world.db_id}_{index:03d}",
            "db_id": world.db_id,
            "question": rng.choice(wordings),
            "query": sql,
            "kind": kind,
            "n_rows": len(database.execute(sql).fetchall()),
        }
        for index, (kind, wordings, sql) in enumerate(chosen)
    ]


def _is_clear(database: sqlite3.Connection, sql: str, kind: str) -> bool:
    """Return True if the query has exactly one meaningful answer."""
    rows = database.execute(sql).fetchall()
    if not rows or rows == [(0,)] or rows == [(None,)]:
        return False
    if kind != "most_common":
        return True
    counts = sql.replace(" LIMIT 1", "").replace("SELECT ", "SELECT count(*), ", 1)
    best, second = (row[0] for row in database.execute(counts).fetchmany(2))
    return best > second
