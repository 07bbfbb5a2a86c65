"""Readers of JSON records, and directories that are created atomically."""

import gzip
import hashlib
import json
import os
import random
import shutil
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_jax.errors import UserError
from lightning_jax.train.config import DataConfig
from lightning_jax.train.tasks import evenly_spaced
from lightning_jax.types import Task

Record = dict[str, Any]


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
            f"{path} does not exist; expected it beside the other files.",
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


def require_text(record: Record, names: tuple[str, ...], where: str) -> None:
    """Raise DatasetError unless each named field is a non-empty text."""
    for name in names:
        value = record.get(name)
        if not isinstance(value, str) or not value.strip():
            raise DatasetError(
                f"{where}: {name} is {value!r}; expected a non-empty string.",
                reason="invalid",
                key=name,
            )


def check_split(split: str) -> None:
    """Raise DatasetError unless `split` is "train" or "dev"."""
    if split not in ("train", "dev"):
        raise DatasetError(
            f"split is {split!r}; expected 'train' or 'dev'.", reason="unknown", key="split"
        )


def limit_tasks(
    tasks: list[Task], split: str, limit: int | None, dropped: Counter[str]
) -> list[Task]:
    """Return at most `limit` tasks of the train split, or all tasks of another split.

    Tasks are spread over the file, because its start may have only one kind. Those left out are
    counted in `dropped`.
    """
    if split != "train" or limit is None or limit >= len(tasks):
        return tasks
    dropped["over_max_train_tasks"] = len(tasks) - limit
    return evenly_spaced(tasks, limit)


def make_directory(target: Path, fill: Callable[[Path], None]) -> Path:
    """Return `target`, created by `fill(directory)` if it does not exist.

    The directory is filled under another name and renamed when complete. A crash thus leaves no
    partial directory, and if two processes create it at once, the first one wins.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            fill(unfinished)
            unfinished.chmod(0o755)
            try:
                os.rename(unfinished, target)
            except OSError:
                if not target.is_dir():
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DatasetError(
            f"{target} cannot be written ({error}); free disk space, or choose another directory.",
            reason="not_writable",
            key=str(target),
        ) from error
    return target


def unpack(archive: Path, cache_dir: Path) -> Path:
    """Return the directory with the contents of the `.tar.gz`, unpacked once per content."""
    try:
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise DatasetError(
            f"{archive} is not readable ({error.strerror}); expected the databases' archive there.",
            reason="unreadable",
            key=str(archive),
        ) from error

    def fill(directory: Path) -> None:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                tar.extractall(
                    directory, filter="data"
                )  # rejects links and paths that lead outside
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DatasetError(
                f"{archive} cannot be unpacked ({error}); download it again.",
                reason="malformed",
                key=str(archive),
            ) from error

    return make_directory(cache_dir / f"{archive.name.removesuffix('.tar.gz')}-{digest}", fill)


DEV_SHARE = 0.2  # share of a single file
SUFFIXES = (".jsonl", ".jsonl.gz", ".json")


def load_task_files(
    root: str | Path | None, split: str, config: DataConfig, cache_dir: str | Path
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks as in the file, and the number left out for each reason.

    `root` is a folder with a file `train` and a file `dev`, or one file of which a fixed fifth is
    dev. Files are `.jsonl`, `.jsonl.gz` or `.json` (a list). A task may have any fields. Without
    `id` it gets its position in the file. Repeated tasks are used once, and tasks in dev are not
    trained on. Writes nothing. Raises DatasetError.
    """
    check_split(split)
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
            "folder with train.jsonl and dev.jsonl.",
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
        num_dev = min(max(1, int(DEV_SHARE * len(tasks))), len(tasks))
        held_out = set(random.Random(0).sample(range(len(tasks)), num_dev))
        found = [task for i, task in enumerate(tasks) if (i in held_out) == (split == "dev")]
    if not found:
        raise DatasetError(
            f"{path} has no {split} tasks; add at least one.", reason="empty", key=split
        )
    found = limit_tasks(found, split, config.max_train_tasks, dropped)
    return found, {reason: number for reason, number in dropped.items() if number}


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
