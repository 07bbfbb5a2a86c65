"""Generated requests for short notes: a task without a right answer."""

import random
from pathlib import Path

from dataset_files import require_no_root

from lightning_jax.types import Task

TOPICS = (
    *("a bakery", "a garden", "a library", "a train station", "a small boat", "a farm", "a school"),
    *("a kitchen", "a bicycle shop", "a river", "a theater", "a hospital", "a campsite", "a zoo"),
    *("a flower market", "a swimming pool", "a coffee shop", "a museum", "a lighthouse", "a park"),
)
WORDS = (
    *("warm", "early", "quiet", "bright", "friend", "morning", "window", "music", "rain", "green"),
    *("letter", "smile", "old", "winter", "light", "story", "fresh", "door", "walk", "gift"),
)
NUM_TRAIN, NUM_DEV = 160, 24


def load_notes(
    root: str | Path | None, split: str, cache_dir: str | Path
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks, always the same in the same order, and that none is left out.

    A task has `id`, `question`, `topic` and `words` (two that the note should use). A topic with
    its words is in one split only. Reads and writes nothing. Raises DatasetError.
    """
    require_no_root(root, "notes")
    rng = random.Random(0)
    by_words: dict[tuple[str, frozenset[str]], Task] = {}
    while len(by_words) < NUM_TRAIN + NUM_DEV:
        topic, words = rng.choice(TOPICS), rng.sample(WORDS, 2)
        question = (
            f"Write one short sentence about {topic}. Use the words {words[0]} and {words[1]}."
        )
        task = {"question": question, "topic": topic, "words": words}
        by_words.setdefault((topic, frozenset(words)), task)
    tasks = list(by_words.values())
    tasks = tasks[:NUM_DEV] if split == "dev" else tasks[NUM_DEV:]
    return [{"id": f"{split}{i}", **task} for i, task in enumerate(tasks)], {}
