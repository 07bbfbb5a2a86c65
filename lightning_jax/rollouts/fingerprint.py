"""Digests of the agent that settings name, to compare a worker's with the run's."""

import hashlib
import json
from pathlib import Path

from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.settings.paths import file_of


def fingerprint(agent: AgentConfig) -> dict[str, str]:
    """Return a digest for each setting of the agent that must be equal everywhere.

    Of a file its content counts, not its path, which may differ between machines. The program that
    runs a command counts by its name, unless it is a script.
    """
    named = {
        "agent.function": _reference(agent.function),
        "agent.command": agent.command and [_word(i, w) for i, w in enumerate(agent.command)],
        "agent.reward": _reference(agent.reward),
        "agent.options": agent.options or None,
        "agent.task_fields": agent.task_fields,
        "agent.posts": None if agent.posts == "auto" else agent.posts,
    }
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()
        for key, value in named.items()
        if value is not None
    }


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _reference(reference: str | None) -> list[str] | None:
    """Return the content and the function of FILE:FUNCTION. MODULE:FUNCTION counts by its name."""
    if reference is None:
        return None
    if (file := file_of(reference)) is None or not Path(file).is_file():
        return [reference]
    return [file_digest(Path(file)), reference.rpartition(":")[2]]


def _word(index: int, word: str) -> str:
    path = Path(word)
    if not path.is_file():
        return path.name if index == 0 else word
    with path.open("rb") as file:
        is_program = index == 0 and file.read(2) != b"#!"
    return path.name if is_program else file_digest(path)
