"""Generated Harbor tasks with small files: one shell command solves each."""

import random
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_jax.environments import harbor
from lightning_jax.types import Task

PROMPTS = Path(__file__).parents[2] / "agents/mini_swe/small.yaml"
WORDS = [
    *("apple", "bread", "cloud", "daisy", "eagle", "flame", "grape", "honey", "island", "jelly"),
    *("kite", "lemon", "maple", "night", "olive", "pearl", "quilt", "river", "stone", "tiger"),
    *("umbrella", "violet", "water", "yarn", "zebra"),
]
NAMES = [
    *("note", "list", "memo", "plan", "text", "data", "word", "item", "info", "page"),
]
TOML = """schema_version = "1.1"
[metadata]
level = {level}
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 10.0
"""
# A file that exists earns a part, so that groups differ before any attempt is right.
TEST = """#!/bin/bash
reward=0
if [ -f {path} ]; then
  reward=0.2
  if [ "$(cat {path})" = {expected} ]; then reward=1; fi
fi
echo $reward > /logs/verifier/reward.txt
"""


def load_files(
    root: str | Path | None, split: str, cache_dir: Path, *, size: int = 120, dev_size: int = 20
) -> tuple[list[Task], dict[str, int]]:
    """Write the split's task folders under `root`, or the cache, and return its tasks.

    Words of dev tasks are in no train task. Level 0 writes a word to a file, level 1 copies a file.
    """
    top = Path(root or cache_dir / "file_tasks").resolve()
    rng = random.Random(split)
    words = WORDS[:5] if split == "dev" else WORDS[5:]
    for number in range(dev_size if split == "dev" else size):
        level, word = number % 2, rng.choice(words)
        old, new = (f"{name}{rng.randrange(10)}.txt" for name in rng.sample(NAMES, 2))
        folder = top / split / f"{number:03d}"
        write_task(folder, level, word, old, new)
    return harbor.read_tasks(top / split, top, "level")


def demonstrate(tasks: Sequence[Task]) -> list[list[dict[str, Any]]]:
    """Return mini-swe-agent's conversation for each task, with the command of its solution."""
    system = yaml.safe_load(PROMPTS.read_text())["agent"]["system_template"].rstrip("\n")
    return [
        [
            {"role": "system", "content": system},
            {"role": "user", "content": task["instruction"]},
            {"role": "assistant", "content": f"```bash\n{_solution(task)}\n```"},
        ]
        for task in tasks
    ]


def _solution(task: Task) -> str:
    return (Path(task["folder"]) / "solution/solve.sh").read_text().splitlines()[-1]


def write_task(folder: Path, level: int, word: str, old: str, new: str) -> None:
    """Write one task folder."""
    instruction = f"Copy {old} to {new}." if level else f"Write the word {word} to {new}."
    test = TEST.format(path=f"/app/{new}", expected=shlex.quote(word))
    files = {
        "instruction.md": f"{instruction}\n",
        "task.toml": TOML.format(level=level),
        "environment/Dockerfile": "FROM debian:stable-slim\nWORKDIR /app\n"
        + (f"COPY {old} .\n" if level else ""),
        "tests/test.sh": test,
        "solution/solve.sh": f"#!/bin/bash\n{f'cp {old}' if level else f'echo {word} >'} {new}\n",
    }
    files |= {f"environment/{old}": f"{word}\n"} if level else {}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
