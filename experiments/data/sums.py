"""Generated sums of two small numbers: a task that a 135M model learns in minutes."""

import random
from pathlib import Path

from dataset_files import require_no_root

from lightning_jax.types import Task

LARGEST = 20
DEV_SHARE = 0.2


def load_sums(
    root: str | Path | None, split: str, cache_dir: str | Path
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks, always the same in the same order, and that none is left out.

    A task has `id`, `question` and `answer` (a number). Pairs of numbers in dev are not in train,
    in either order. Reads and writes nothing. Raises DatasetError.
    """
    require_no_root(root, "sums")
    rng = random.Random(0)
    numbers = range(1, LARGEST + 1)
    pairs = [rng.sample((a, b), 2) for a in numbers for b in numbers if a <= b]
    rng.shuffle(pairs)
    num_dev = int(DEV_SHARE * len(pairs))
    chosen = pairs[:num_dev] if split == "dev" else pairs[num_dev:]
    tasks = [
        {"id": f"{split}{i}", "question": f"What is {a} + {b}?", "answer": a + b}
        for i, (a, b) in enumerate(chosen)
    ]
    return tasks, {}
