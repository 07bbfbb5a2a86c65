"""Tasks in JSON files."""

import json
from collections import Counter
from pathlib import Path

from lightning_jax.settings.loading import part_of
from lightning_jax.traces.rows import free_name, is_unnamed
from lightning_jax.train.tasks.record_files import SUFFIXES, DatasetError, read_records
from lightning_jax.types import Task

MAX_NAMED = 5  # files of a folder that an error names


def load_task_files(
    root: str | Path | None, split: str, cache_dir: str | Path
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks as in the file, and the number left out for each reason.

    `root` is a folder with a file `train` and a file `dev`, or one file of which a fixed fifth is
    dev. Files have JSON lines or a JSON list (`read_records`). A task may have any fields. Without
    `id`, or if it is null, it gets its position in the file. Repeated tasks are used once, and
    tasks in dev are not trained on. Writes nothing. Raises DatasetError.
    """
    if root is None:
        raise DatasetError.missing(
            "data.root",
            "data.root is null; expected a file of tasks, or a folder with train.jsonl and "
            "dev.jsonl. Set data.root.",
        )
    path, dropped = Path(root), Counter[str]()
    if not path.exists():
        raise DatasetError.not_found(
            "data.root",
            f"data.root is {str(root)!r}, which does not exist; expected a file of tasks, or a "
            "folder with train.jsonl and dev.jsonl. A path in a config is relative to the config.",
        )
    if path.is_dir():
        tasks_of_split = _read(_file(path, split), dropped)
        if split == "train":
            dev_contents = {_content(task) for task in _read(_file(path, "dev"), Counter())}
            kept = [task for task in tasks_of_split if _content(task) not in dev_contents]
            dropped["in_dev"] = len(tasks_of_split) - len(kept)
            tasks_of_split = kept
    else:
        tasks = _read(path, dropped if split == "train" else Counter())  # counted once
        if len(tasks) == 1:
            raise DatasetError(
                f"data.root {path} has one task; add others, because a fifth of them is kept for "
                "evaluation, or use a folder with train.jsonl and dev.jsonl.",
                reason="too_few",
                key="data.root",
            )
        tasks_of_split = part_of(split, tasks)
    return tasks_of_split, {reason: number for reason, number in dropped.items() if number}


def read_tasks(path: Path) -> list[Task]:
    """Return the distinct tasks of one file, as `load_task_files`. Raises DatasetError."""
    tasks = _read(path, Counter())
    if not tasks:
        raise DatasetError.empty(str(path), f"{path} has no tasks; add one.")
    return tasks


def _file(folder: Path, split: str) -> Path:
    for suffix in SUFFIXES:
        if (path := folder / f"{split}{suffix}").is_file():
            return path
    files = sorted(path.name for path in folder.iterdir() if path.is_file())[:MAX_NAMED]
    raise DatasetError.missing(
        f"{split}.jsonl",
        f"{folder} has no {split}.jsonl (it has {', '.join(files) or 'no file'}); expected "
        f"train.jsonl and dev.jsonl, or the same with {', '.join(SUFFIXES[1:])}.",
    )


def _read(path: Path, dropped: Counter[str]) -> list[Task]:
    """Return the file's distinct tasks, and count repeated ones in `dropped`.

    A task without an id has its position as the id.
    """
    contents: set[str] = set()
    used_in: dict[str, str] = {}
    tasks: list[Task] = []
    unnamed: list[tuple[int, Task]] = []
    for number, (where, record) in enumerate(read_records(path), start=1):
        if (content := _content(record)) in contents:
            dropped["repeated"] += 1
            continue
        contents.add(content)
        task = {"id": ""} | record
        tasks.append(task)
        if is_unnamed(record):
            unnamed.append((number, task))
            continue
        task["id"] = name = str(record["id"])
        if name in used_in:
            raise DatasetError(
                f"{where} repeats the id {name!r} of {used_in[name]}; use unique ids, or none.",
                reason="duplicate",
                key="id",
            )
        used_in[name] = where
    for number, task in unnamed:
        task["id"] = free_name(str(number), used_in)
    return tasks


def _content(task: Task) -> str:
    """Return a key that is equal for equal tasks, ignoring ids."""
    return json.dumps({name: task[name] for name in task if name != "id"}, sort_keys=True)
