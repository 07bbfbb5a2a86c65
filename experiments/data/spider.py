"""Text-to-SQL tasks: Spider as published, its compact files, or a generated set.

Spider: Yu et al., EMNLP 2018.
"""

import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dataset_files import require_text, unpack, wrong_field
from generated_sql import generated_root

from lightning_jax.settings.schema import Count
from lightning_jax.train.tasks.record_files import DatasetError, Record, read_records
from lightning_jax.types import Task

sys.path.append(str(Path(__file__).parents[2] / "agents"))
from sqlite_sandbox import quoted

_PUBLISHED = {"train": ("train_spider.json", "train_others.json"), "dev": ("dev.json",)}
_GOLD_TIME_LIMIT_S = 60.0


@dataclass(frozen=True)
class _Source:
    """Files of one split, in either layout."""

    questions: tuple[Path, ...]
    tables: Path
    databases: Path  # holds <db_id>/<db_id>.sqlite


def load_spider(
    root: str | Path | None,
    split: str,
    cache_dir: str | Path,
    *,
    max_schema_chars: Count | None = None,
    require_rows: bool = True,
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks in file order, and the number left out for each reason.

    A task has `id`, `db_id`, `question`, `query` (gold SQL), `db_path` (absolute), `schema` (text
    for a prompt) and the other fields of its row. `root` None is the generated set. Archives are
    unpacked, and the generated set is written, once, under `cache_dir`. Raises DatasetError.

    Tasks are left out if their schema is longer than `max_schema_chars` or, with `require_rows`,
    if the gold query returns no row.
    """
    cache = Path(cache_dir).absolute()
    folder = generated_root(cache) if root is None else Path(root).expanduser().absolute()
    tasks, left_out = [], Counter[str]()
    for task in list(_tasks(_find(folder, split, cache), split)):
        if max_schema_chars is not None and len(task["schema"]) > max_schema_chars:
            left_out["schema_too_long"] += 1
        elif require_rows and (reason := _lack_of_rows(task)):
            left_out[reason] += 1
        else:
            tasks.append(task)
    return tasks, dict(left_out)


def schema_text(record: Record) -> str:
    """Return the schema for a prompt: a line `table(column, ...)` per table, then the foreign keys.

    `record` is an entry of Spider's tables.json. Names are those of the database, quoted for SQL.
    """
    tables = [quoted(name) for name in record["table_names_original"]]
    columns = [(table, quoted(name)) for table, name in record["column_names_original"]]
    lines = [
        f"{name}({', '.join(column for owner, column in columns if owner == index)})"
        for index, name in enumerate(tables)
        if not name.startswith("sqlite_")  # internal tables of SQLite
    ]
    keys = [
        "=".join(f"{tables[columns[i][0]]}.{columns[i][1]}" for i in pair)
        for pair in record["foreign_keys"]
    ]
    return "\n".join(lines + ([f"Keys: {', '.join(keys)}"] if keys else []))


def _find(folder: Path, split: str, cache: Path) -> _Source:
    if not folder.is_dir():
        raise DatasetError(
            f"data.root is {str(folder)!r}, which is not a folder; expected Spider's files there, "
            "or data.root=null for the generated set.",
            reason="not_a_directory",
            key="data.root",
        )
    if (compact := folder / f"{split}.jsonl.gz").is_file():
        databases = unpack(folder / f"databases_{split}.tar.gz", cache)
        return _Source((compact,), folder / "tables.jsonl.gz", databases / "database")
    first, *more = (folder / name for name in _PUBLISHED[split])
    if first.is_file():
        questions = (first, *(path for path in more if path.is_file()))
        return _Source(questions, folder / "tables.json", folder / "database")
    raise DatasetError(
        f"data.root {folder} has neither {compact.name} (the compact layout) nor {first.name} (the "
        "published one); expected one of them, check the path.",
        reason="not_found",
        key="data.root",
    )


def _tasks(source: _Source, split: str) -> Iterator[Task]:
    schemas = _read_schemas(source.tables)
    rows = (pair for path in source.questions for pair in read_records(path))
    for index, (where, row) in enumerate(rows):
        require_text(row, ("db_id", "question", "query"), where)
        task = {"id": f"spider_{split}_{index:05d}", **row}
        require_text(task, ("id",), where)
        db_id, db_path = row["db_id"], source.databases / row["db_id"] / f"{row['db_id']}.sqlite"
        if db_id not in schemas:
            raise wrong_field(where, "db_id", db_id, f"a db_id of {source.tables}", "unknown")
        if not db_path.is_file():
            raise DatasetError(
                f"{where}: database {db_path} does not exist; expected a SQLite file.",
                reason="not_found",
                key=str(db_path),
            )
        yield task | {"db_path": str(db_path), "schema": schemas[db_id]}


def _read_schemas(path: Path) -> dict[str, str]:
    schemas = {}
    for where, record in read_records(path):
        require_text(record, ("db_id",), where)
        try:
            schemas[record["db_id"]] = schema_text(record)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DatasetError(
                f"{where}: the schema of {record['db_id']!r} is broken ({error!r}); expected "
                "table_names_original, column_names_original and foreign_keys as Spider has them.",
                reason="malformed",
                key=record["db_id"],
            ) from error
    return schemas


def _lack_of_rows(task: Task) -> str | None:
    """Return the reason to leave a task out if its gold query returns no row, else None."""
    try:
        has_rows = task["n_rows"] > 0 if isinstance(task.get("n_rows"), int) else _has_rows(task)
    except sqlite3.Error:
        return "gold_fails"
    return None if has_rows else "gold_returns_no_row"


def _has_rows(task: Task) -> bool:
    """Run the gold query on the database, opened read-only. Return True if it returns a row."""
    deadline = time.monotonic() + _GOLD_TIME_LIMIT_S
    uri = f"{Path(task['db_path']).as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as connection:
        connection.text_factory = bytes  # published text is not always UTF-8
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        return connection.execute(task["query"]).fetchone() is not None
