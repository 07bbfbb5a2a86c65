"""Tasks of a run: from the loader that `data.load` names, or from the files at `data.root`."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import load_function, read_options
from lightning_jax.train.config import Config, DataConfig
from lightning_jax.train.tasks.record_files import DatasetError
from lightning_jax.train.tasks.task_files import load_task_files
from lightning_jax.types import Task

log = logging.getLogger(__name__)

Item = TypeVar("Item")

# Tasks of a split, and the number left out for each reason.
Split = tuple[list[Task], Mapping[str, int]]
# Called with data.root, "train" or "dev", a directory to keep files in, and data.options by name.
Loader = Callable[..., Split]


def load_tasks(config: Config) -> tuple[list[Task], list[Task]]:
    """Return the train and dev tasks. Log their numbers and the numbers left out.

    Raises ConfigError for an unsuitable loader or option, and DatasetError for unusable data.
    """
    data = config.data
    needs_none = config.agent.external or config.learn.run is not None
    if needs_none and data.load is None and data.root is None:
        return [], []  # the rollouts have tasks
    load = load_function(data.load) if data.load else load_task_files
    cache_dir = Path(config.run_dir).parent / "data"  # shared by neighboring runs
    splits = {split: _load_split(load, split, data, cache_dir) for split in ("train", "dev")}
    counts = ", ".join(
        f"{len(tasks)} {split} tasks{_reasons(left_out)}"
        for split, (tasks, left_out) in splits.items()
    )
    left_out = {split: left_out for split, (_, left_out) in splits.items()}
    log.info("%s", counts, extra={"event": "tasks_loaded", "left_out": left_out})
    return splits["train"][0], splits["dev"][0]


def _load_split(load: Loader, split: str, data: DataConfig, cache_dir: Path) -> Split:
    options = read_options(load, ("root", "split", "cache_dir"), data.options, "data")
    loaded = load(data.root, split, cache_dir, **options)
    if not (isinstance(loaded, tuple) and len(loaded) == 2):
        raise ConfigError.wrong_type(
            "data.load",
            f"{data.load} returned a {type(loaded).__name__}; return (tasks, left_out), where "
            "left_out is a dict with the number of tasks left out for each reason.",
        )
    tasks, left_out = list(loaded[0]), dict(loaded[1])
    if not tasks:
        fix = (
            "add at least one, or relax data.options"
            if data.load or left_out
            else "add tasks, at least 2 to a file of both splits and 1 each to train.jsonl and "
            "dev.jsonl of a folder"
        )
        raise DatasetError.empty(
            split, f"data.root {data.root} gives 0 {split} tasks{_reasons(left_out)}; {fix}."
        )
    _check_ids(tasks, split)
    if split == "train" and data.max_train_tasks and len(tasks) > data.max_train_tasks:
        left_out["over_max_train_tasks"] = len(tasks) - data.max_train_tasks
        tasks = evenly_spaced(tasks, data.max_train_tasks)  # a file's start may have only one kind
    return tasks, left_out


def _check_ids(tasks: list[Task], split: str) -> None:
    """Raise DatasetError unless every task has a unique id."""
    for name, count in Counter(task.get("id") for task in tasks).items():
        if not isinstance(name, str) or count > 1:
            raise DatasetError(
                f"{count} {split} tasks have the id {name!r}; use a unique string for each.",
                reason="duplicate" if isinstance(name, str) else "wrong_type",
                key="id",
            )


def _reasons(left_out: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
    return f" (left out: {reasons})" if reasons else ""


def evenly_spaced(items: Sequence[Item], limit: int) -> list[Item]:
    """Return at most `limit` items, evenly spaced.

    The start of a file may not be representative.
    """
    if len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]
