"""Choice between running the agent in this process and in workers."""

import logging
import os
from collections.abc import Sequence
from typing import Any

import jax

from lightning_jax.rollouts.agents.functions import Agent, as_agent
from lightning_jax.rollouts.agents.program import make_agent
from lightning_jax.rollouts.config import AgentConfig, require_agent
from lightning_jax.rollouts.workers.work import first_unsendable, unsendable
from lightning_jax.settings import ConfigError
from lightning_jax.types import Task

log = logging.getLogger(__name__)

MAX_DEFAULT = 4  # workers on a machine with many cores
CORES_PER_WORKER = 4


def choose_agent(
    config: AgentConfig,
    function: Any,
    tasks: Sequence[Task],
    *,
    num_others: int = 0,
    is_needed: bool = True,
) -> Agent | int | None:
    """Return the agent, loaded, or the number of local workers that will load it.

    With 0 of them, others have to join. `num_others` workers run elsewhere, whom Ray places.
    `function` replaces the agent of the settings. Return None if none is named and none is needed.
    Raises ConfigError if the agent is unusable, or if workers are set that could not run it on
    these tasks.
    """
    if not (is_needed or function or config.is_named):
        return None
    _check_fields(config, tasks)
    chosen, has_others = config.workers, config.remote_workers or num_others > 0
    if chosen is None:
        is_possible = function is None and not has_others
        chosen = _default_number() if is_possible else 0
    if not chosen and not has_others:
        return make_agent(config) if function is None else as_agent(function, config.options)
    key = next(
        key
        for key, is_set in (
            ("agent.workers", config.workers),
            ("cluster.workers", num_others),
            ("agent.remote_workers", True),
        )
        if is_set
    )
    if function is not None:
        raise ConfigError.conflict(
            key,
            f"{key} is set, but the agent is a function of this process, which workers cannot "
            f"load; set agent.function to FILE:FUNCTION instead of passing it, or leave out {key}.",
        )
    require_agent(config)
    task = first_unsendable(tasks)
    if task is not None and (config.workers or has_others):
        raise unsendable(task)
    if task is not None:
        log.info("agents run in this process: %s", unsendable(task))
        return make_agent(config)
    return chosen


def _check_fields(config: AgentConfig, tasks: Sequence[Task]) -> None:
    """Raise ConfigError if a program should get a field that no task has."""
    present = {name for task in tasks for name in task} if config.task_fields else set()
    unknown = [name for name in config.task_fields or () if tasks and name not in present]
    if unknown:
        raise ConfigError.unknown(
            "agent.task_fields",
            f"agent.task_fields names {', '.join(unknown)}, which no task has; expected some of "
            f"{', '.join(sorted(map(str, present)))}.",
        )


def _default_number() -> int:
    if jax.default_backend() == "cpu":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MAX_DEFAULT, (cores or 1) // CORES_PER_WORKER))
