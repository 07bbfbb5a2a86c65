"""Tasks in JSON files, and the reader of their records."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_jax.environments.split import part_of
from lightning_jax.errors import UserError
from lightning_jax.types import Task

Record = dict[str, Any]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json")


class DatasetError(UserError, ValueError):
    """Unusable data set. The message is one sentence for the user who named it."""


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) for each record of a `.jsonl`, `.jsonl.gz` or JSON-list file.

    Raises DatasetError for a missing or broken file, at the first broken record.
    """
    try:
        records = _lines(path) if path.suffix in (".gz", ".jsonl") else _items(path)
        for where, record in records:
            if not isinstance(record, dict):
                raise DatasetError(
                    f"{where} is a {type(record).__name__}; expected an object.",
                    reason="wrong_type",
                    key=where,
                )
            yield where, record
    except FileNotFoundError:
        raise DatasetError(
            f"{path} does not exist; check the path.",
            reason="not_found",
            key=str(path),
        ) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{path} is not readable ({error}); download it again.",
            reason="unreadable",
            key=str(path),
        ) from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8-sig") as lines:  # Windows adds a byte order mark
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    items = _parse(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(items, list):
        raise DatasetError(
            f"{path} holds a {type(items).__name__}; expected a JSON list of records.",
            reason="wrong_type",
            key=str(path),
        )
    for number, item in enumerate(items, start=1):
        yield f"{path}: item {number}", item


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f" line {error.lineno}" if "\n" in text.rstrip("\n") else ""
        raise DatasetError(
            f"{where}{line} is not JSON ({error.msg}); correct or remove it.",
            reason="malformed",
            key=where,
        ) from error


def load_task_files(
    root: str | Path | None, split: str, cache_dir: str | Path
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks as in the file, and the number left out for each reason.

    `root` is a folder with a file `train` and a file `dev`, or one file of which a fixed fifth is
    dev. Files are `.jsonl`, `.jsonl.gz` or `.json` (a list). A task may have any fields. Without
    `id` it gets its position in the file. Repeated tasks are used once, and tasks in dev are not
    trained on. Writes nothing. Raises DatasetError.
    """
    if root is None:
        raise DatasetError(
            "data.root is null; expected a file of tasks, or a folder with train.jsonl and "
            "dev.jsonl. Set data.root.",
            reason="missing",
            key="data.root",
        )
    path, dropped = Path(root), Counter[str]()
    if not path.exists():
        raise DatasetError(
            f"data.root is {str(root)!r}, which does not exist; expected a file of tasks, or a "
            "folder with train.jsonl and dev.jsonl. A path in a config is relative to the config.",
            reason="not_found",
            key="data.root",
        )
    if path.is_dir():
        found = _read(_file(path, split), dropped)
        if split == "train":
            asked = {_content(task) for task in _read(_file(path, "dev"), Counter())}
            kept = [task for task in found if _content(task) not in asked]
            dropped["in_dev"] = len(found) - len(kept)
            found = kept
    else:
        tasks = _read(path, dropped if split == "train" else Counter())  # counted once
        if len(tasks) == 1:
            raise DatasetError(
                f"data.root {path} has one task; add others, because a fifth of them is kept for "
                "evaluation, or use a folder with train.jsonl and dev.jsonl.",
                reason="too_few",
                key="data.root",
            )
        found = part_of(split, tasks)
    return found, {reason: number for reason, number in dropped.items() if number}


def read_tasks(path: Path) -> list[Task]:
    """Return the distinct tasks of one file, as `load_task_files`. Raises DatasetError."""
    tasks = _read(path, Counter())
    if not tasks:
        raise DatasetError(f"{path} has no tasks; add one.", reason="empty", key=str(path))
    return tasks


def _file(folder: Path, split: str) -> Path:
    for suffix in SUFFIXES:
        if (path := folder / f"{split}{suffix}").is_file():
            return path
    raise DatasetError(
        f"{folder} has no {split}.jsonl; expected train.jsonl and dev.jsonl.",
        reason="missing",
        key=f"{split}.jsonl",
    )


def _read(path: Path, dropped: Counter[str]) -> list[Task]:
    """Return the file's distinct tasks, and count repeated ones in `dropped`."""
    contents: set[str] = set()
    used_in: dict[str, str] = {}
    tasks: list[Task] = []
    for number, (where, record) in enumerate(read_records(path), start=1):
        if (content := _content(record)) in contents:
            dropped["repeated"] += 1
            continue
        contents.add(content)
        task = {"id": str(number)} | record
        task["id"] = name = str(task["id"])
        if name in used_in:
            raise DatasetError(
                f"{where} repeats the id {name!r} of {used_in[name]}; use unique ids, or none.",
                reason="duplicate",
                key="id",
            )
        used_in[name] = where
        tasks.append(task)
    return tasks


def _content(task: Task) -> str:
    """Return a key that is equal for equal tasks, ignoring ids."""
    return json.dumps({name: task[name] for name in task if name != "id"}, sort_keys=True)
