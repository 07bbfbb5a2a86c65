"""Comparison of a run that resumes with the run that began: its settings, files and tasks.

Settings only name the agent's files and the tasks, so digests of them are kept. A run with other
settings, files or tasks is another run, which may not use the stored rollouts.
"""

import contextlib
import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_jax.rl.config import Choice
from lightning_jax.rollouts.workers.work import file_digest
from lightning_jax.settings import ConfigError, save_config
from lightning_jax.settings.paths import file_of
from lightning_jax.system.files import write_whole
from lightning_jax.traces.store import CRASH, Store
from lightning_jax.train.config import Config
from lightning_jax.train.directory import SETTINGS, SOURCES
from lightning_jax.types import Task

log = logging.getLogger(__name__)

# Settings that may change when a run resumes while stored rollouts stay valid.
HARMLESS = (
    "run_dir", "num_steps", "eval.", "checkpoint.", "serve.", "rollout.concurrency",
    "rollout.retry_delay_s", "rollout.max_retry_delay_s", "rollout.ahead", "mesh.", "distributed.",
    "cluster.", "model.remat", "agent.max_processes", "agent.memory_mib", "agent.workers",
    "agent.remote_workers", "agent.lease_s", "agent.idle_s", "metrics.", "traces.",
    "learn.num_steps",
)  # fmt: skip

# Settings that affect a step's update but not the rollouts of existing weights.
LEARNING = (
    "optimizer.", "algorithm.", "distill.", "batch.", "warmup.", "rewards.", "hooks",
)  # fmt: skip


def find_changes(directory: Path, keys: Sequence[str], sources: dict[str, str]) -> list[str]:
    """Return the changed settings and sources that make stored rollouts those of another run.

    `keys` are the changed settings and `sources` today's `digests`. Raises ConfigError for a
    damaged file.
    """
    harmful = [key for key in keys if not key.startswith(HARMLESS)]
    return harmful + changed_sources(directory, sources)


def resume(
    store: Store,
    config: Config,
    sources: dict[str, str],
    changed: Sequence[str],
    step: int,
    untaken: Sequence[str] = (),
) -> None:
    """Prepare a run's directory for going on at `step`, and save its settings and digests.

    If they changed, first mark the stored rollouts of coming steps as those of another run, so that
    a crash in between does no harm. `untaken` are the ids of groups that coming steps will train.
    Rollouts that a crash interrupted will run again, and those that ended the run by failing.
    """
    store.supersede_marked()
    if changed:
        first = first_discarded(changed, step)
        only_learning = first > step
        # Groups that began before this step have seen none of the weights that will change.
        store.supersede(first, () if only_learning else untaken)
        if any(key.startswith("rewards.") for key in changed):
            store.forget_scores(step, untaken)
        log.warning(
            "changed since this run began: %s; the run resumes from step %d and discards stored "
            "rollouts of step %d and later",
            ", ".join(changed),
            step,
            first,
            extra={"event": "settings_changed", "changed": changed, "step": step},
        )
    directory = Path(config.run_dir)
    save_config(config, directory / SETTINGS)
    write_whole(directory / SOURCES, json.dumps(sources, indent=1) + "\n")
    if abandoned := store.abandon_running(CRASH):
        log.info(
            "%d rollouts were interrupted when the last process ended; running them again",
            abandoned,
        )


def first_discarded(changed: Sequence[str], step: int) -> int:
    """Return the first step that takes over nothing stored, for a run that resumes at `step`."""
    return step + all(key.startswith(LEARNING) for key in changed)


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
    agent, template = config.agent, config.model.chat_template
    named = {
        "agent.reward": _file_of(agent.reward),
        "distill.hint": _file_of(config.distill.hint),
        "rollout.source": _file_of(config.rollout.source),
        "warmup.demonstrations": _file_of(config.warmup.demonstrations),
        "model.chat_template": template and Path(template).expanduser(),
    }
    named |= {f"hooks[{index}]": _file_of(name) for index, name in enumerate(config.hooks)}
    for name, reward in config.rewards.items():
        judge = reward.judge
        named |= {
            f"rewards.{name}.function": _file_of(reward.function),
            f"rewards.{name}.group": _file_of(reward.group),
            f"rewards.{name}.judge.rubric": Path(judge.rubric) if judge and judge.rubric else None,
        }
    if agent.command is None:
        named["agent.function"] = _file_of(agent.function)
    else:
        named |= {f"agent.command's {word}": Path(word) for word in agent.command}
    sources = {
        f"{name} (its file)": file_digest(path)
        for name, path in named.items()
        if path is not None and path.is_file()
    }
    if function is not None:
        with contextlib.suppress(OSError, TypeError):  # not every callable has a source
            source = inspect.getsource(function).encode()
            sources["agent (its source)"] = hashlib.sha256(source).hexdigest()
    return sources | {"train tasks": _of_tasks(train_tasks), "dev tasks": _of_tasks(dev_tasks)}


def changed_sources(directory: Path, now: dict[str, str]) -> list[str]:
    """Return the names whose digest differs from the saved one, or [] if none was saved.

    Raises ConfigError for a damaged file.
    """
    path = directory / SOURCES
    if not path.exists():
        return []
    try:
        old = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError.malformed(
            str(path),
            f"{path} is damaged ({error}); delete it to continue without the check for changed "
            "agent files and tasks.",
        ) from error
    return sorted(name for name in now if name in old and now[name] != old[name])


def _file_of(reference: Choice | None) -> Path | None:
    file = file_of(reference) if isinstance(reference, str) else None
    return None if file is None else Path(file)


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
