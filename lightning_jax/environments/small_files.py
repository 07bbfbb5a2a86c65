"""Generated Harbor tasks with small files: one shell command or one edit solves each."""

import random
import shlex
from dataclasses import dataclass
from pathlib import Path

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
timeout_sec = {seconds:.1f}
[verifier]
timeout_sec = 10.0
"""
# A first step earns a part, so that groups differ before any attempt is right.
TEST = """#!/bin/bash
reward=0
if {begun}; then
  reward=0.2
  if [ "$(cat {path})" = {expected} ]; then reward=1; fi
fi
echo $reward > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class FileTask:
    """Task of writing one file."""

    level: int
    instruction: str
    solution: str  # a shell command
    path: str  # file that the test reads
    expected: str  # its content at the end
    start: tuple[str, str] | None = None  # file to start from, and its content
    begun: str = "[ -f {path} ]"  # shell's condition for a part of the reward


def write_tasks(
    folder: Path, split: str, number: int, *, levels: int = 2, seconds: float = 120.0
) -> None:
    """Write task folders for train or dev, with the levels in turns.

    Level 0 writes a word to a file, level 1 copies a file, level 2 replaces a word in one. Words of
    dev tasks are in no train task. An agent has `seconds` for a task.
    """
    rng = random.Random(split)
    words = WORDS[:5] if split == "dev" else WORDS[5:]
    for index in range(number):
        level, word = index % levels, rng.choice(words)
        old, new = (f"{name}{rng.randrange(10)}.txt" for name in rng.sample(NAMES, 2))
        if level == 0:
            task = _writing(word, new)
        elif level == 1:
            task = _copying(word, old, new)
        else:
            task = _replacing(rng.sample([w for w in words if w != word], 3), word, old)
        _write(folder / f"{index:03d}", task, seconds)


def _writing(word: str, path: str) -> FileTask:
    return FileTask(0, f"Write the word {word} to {path}.", f"echo {word} > {path}", path, word)


def _copying(word: str, old: str, new: str) -> FileTask:
    return FileTask(
        1, f"Copy {old} to {new}.", f"cp {old} {new}", new, word, start=(old, f"{word}\n")
    )


def _replacing(words: list[str], word: str, path: str) -> FileTask:
    """Return a task of replacing the second of several words."""
    return FileTask(
        2,
        f"Replace the word {words[1]} by {word} in {path}.",
        f"sed -i s/{words[1]}/{word}/ {path}",
        path,
        "\n".join([words[0], word, *words[2:]]),
        start=(path, "\n".join([*words, ""])),
        begun=f"grep -q {word} {{path}}",
    )


def _write(folder: Path, task: FileTask, seconds: float) -> None:
    """Write one task folder."""
    path = f"/app/{task.path}"
    test = TEST.format(
        begun=task.begun.format(path=path), path=path, expected=shlex.quote(task.expected)
    )
    copied = f"COPY {task.start[0]} .\n" if task.start else ""
    files = {
        "instruction.md": f"{task.instruction}\n",
        "task.toml": TOML.format(level=task.level, seconds=seconds),
        "environment/Dockerfile": f"FROM debian:stable-slim\nWORKDIR /app\n{copied}",
        "tests/test.sh": test,
        "solution/solve.sh": f"#!/bin/bash\n{task.solution}\n",
    }
    files |= {f"environment/{task.start[0]}": task.start[1]} if task.start else {}
    for name, text in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
