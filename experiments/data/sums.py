"""Generated sums of two small numbers: a task that a 135M model learns in minutes."""

import random
from collections import Counter
from pathlib import Path

from lightning_jax.train.config import DataConfig
from lightning_jax.train.task_files import DatasetError, check_split, limit_tasks
from lightning_jax.types import Task

LARGEST = 20
DEV_SHARE = 0.2


def load_sums(
    root: str | Path | None, split: str, config: DataConfig, cache_dir: str | Path
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks and the number left out for each reason.

    A task has `id`, `question` and `answer` (a number). Pairs of numbers in dev are not in train,
    in either order. Reads and writes nothing. Raises DatasetError.
    """
    check_split(split)
    if root is not None:
        raise DatasetError(
            f"data.root is {str(root)!r}; expected null, because sums are generated.",
            reason="unsupported",
            key="data.root",
        )
    dropped: Counter[str] = Counter()
    tasks = limit_tasks(_tasks(split), split, config.max_train_tasks, dropped)
    return tasks, dict(dropped)


def _tasks(split: str) -> list[Task]:
    """Return the same tasks in the same order each time."""
    rng = random.Random(0)
    numbers = range(1, LARGEST + 1)
    pairs = [rng.sample((a, b), 2) for a in numbers for b in numbers if a <= b]
    rng.shuffle(pairs)
    num_dev = int(DEV_SHARE * len(pairs))
    found = pairs[:num_dev] if split == "dev" else pairs[num_dev:]
    return [
        {"id": f"{split}{i}", "question": f"What is {a} + {b}?", "answer": a + b}
        for i, (a, b) in enumerate(found)
    ]
