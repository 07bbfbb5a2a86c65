"""Tasks of a user: JSON objects in files, one per line."""

import json
import random
from collections import Counter
from pathlib import Path

from lightning_jax.config import DataConfig
from lightning_jax.datasets.files import (
    DatasetError,
    check_split,
    limit_tasks,
    read_records,
)
from lightning_jax.types import Task

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
