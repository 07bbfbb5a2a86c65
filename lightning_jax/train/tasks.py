"""Tasks of a run: an endless shuffled pipeline with a resumable position, groups and samples."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import grain

from lightning_jax.settings import ConfigError
from lightning_jax.types import Task


class TaskIterator:
    """Endless shuffled batches of `items`, reshuffled in each pass.

    Batches continue across passes, so all have `batch_size` items. `state()` is a small JSON
    object. After `restore` of it the same batches follow. Without items there is no batch.
    """

    def __init__(self, items: Sequence[Any], batch_size: int, seed: int) -> None:
        self._iterator = None
        if not items:
            return
        pipeline = grain.MapDataset.source(items).seed(seed).shuffle().repeat()
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)
        if batch_size > 1:
            batches = pipeline.batch(batch_size, batch_fn=list)
        else:  # Grain cannot count endless batches of one
            batches = pipeline.map(lambda item: [item])
        self._iterator = iter(batches.to_iter_dataset(options))

    def __next__(self) -> list[Any]:
        if self._iterator is None:
            raise no_tasks()
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        return self._iterator.get_state() if self._iterator else {}

    def restore(self, state: dict[str, Any]) -> None:
        if self._iterator and state:
            self._iterator.set_state(state)


def no_tasks() -> ConfigError:
    """Return the error for a run without training tasks."""
    return ConfigError(
        "there are no tasks to train on; check data.root.", reason="empty", key="data.root"
    )


def group_tasks(tasks: Sequence[Task], field: str | None, size: int) -> list[list[Task]]:
    """Group tasks with the same value of `field` into lists of at most `size`, in order.

    If `field` is None, neighbors are grouped. Groups put demonstrations with a long shared prefix
    into one batch, where the prefix is computed once.
    """
    by_value: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_value[json.dumps(task.get(field), default=repr) if field else ""].append(task)
    return [
        members[start : start + size]
        for members in by_value.values()
        for start in range(0, len(members), size)
    ]
