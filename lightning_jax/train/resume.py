"""Digests of the agent's files and the tasks, which settings only name.

A run that resumes with other files or tasks is another run, as if a setting had changed.
"""

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_jax.settings import ConfigError
from lightning_jax.system.files import write_whole
from lightning_jax.train.config import Config
from lightning_jax.types import Task

NAME = "sources.json"  # in a run's directory


def digests(
    config: Config,
    train_tasks: Sequence[Task],
    dev_tasks: Sequence[Task],
    function: Callable[..., Any] | None = None,
) -> dict[str, str]:
    """Return a digest of each source, by the setting that names it.

    For an agent only its own file counts, not its imports. For a `function` that replaces the
    settings' agent, its own source counts. For a task, absolute paths and URLs do not count,
    because they may differ at each start.
    """
    agent = config.agent
    named = {
        "agent.reward": _file_of(agent.reward),
        "warmup.demonstrations": _file_of(config.warmup.demonstrations),
    }
    if agent.command is None:
        named["agent.function"] = _file_of(agent.function)
    else:
        named |= {f"agent.command's {word}": Path(word) for word in agent.command}
    found = {
        f"{name} (its file)": hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in named.items()
        if path is not None and path.is_file()
    }
    if function is not None:
        with contextlib.suppress(OSError, TypeError):  # not every callable has a source
            source = inspect.getsource(function).encode()
            found["agent (its source)"] = hashlib.sha256(source).hexdigest()
    return found | {"train tasks": _of_tasks(train_tasks), "dev tasks": _of_tasks(dev_tasks)}


def changed_sources(directory: Path, now: dict[str, str]) -> list[str]:
    """Return the names whose digest differs from the saved one, or [] if none was saved.

    Raises ConfigError for a damaged file.
    """
    path = directory / NAME
    if not path.exists():
        return []
    try:
        old = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}); delete it to continue without the check for changed "
            "agent files and tasks.",
            reason="malformed",
            key=str(path),
        ) from error
    return sorted(name for name in now if name in old and now[name] != old[name])


def save_sources(directory: Path, now: dict[str, str]) -> None:
    """Save the digests for the next start."""
    write_whole(directory / NAME, json.dumps(now, indent=1) + "\n")


def _file_of(reference: str | None) -> Path | None:
    return Path(reference.rpartition(":")[0]) if reference else None


def _of_tasks(tasks: Sequence[Task]) -> str:
    whole = hashlib.sha256()
    for task in tasks:
        stays = {name: value for name, value in task.items() if not _is_place(value)}
        whole.update(json.dumps(_canonical(stays), sort_keys=True).encode())
    return whole.hexdigest()


def _canonical(value: Any) -> Any:
    """Return the value in a form that is the same in every process.

    The order of sets and the addresses of objects would differ.
    """
    match value:
        case Mapping():
            return {str(name): _canonical(item) for name, item in value.items()}
        case list() | tuple():
            return [_canonical(item) for item in value]
        case set() | frozenset():
            return sorted(map(repr, value))
        case str() | int() | float() | None:
            return value
    has_words = type(value).__repr__ is not object.__repr__
    return repr(value) if has_words else type(value).__name__


def _is_place(value: Any) -> bool:
    is_url = isinstance(value, str) and value.startswith(("http://", "https://"))
    return is_url or (isinstance(value, os.PathLike | str) and os.path.isabs(value))
