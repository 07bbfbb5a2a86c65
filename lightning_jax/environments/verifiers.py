"""Tasks of the `verifiers` package (1.0 interface, 0.4 and newer), scored by their own rewards.

`load` is a loader for `data.load`, and `run` is an agent for `agent.function`. The package runs a
rollout by itself: its harness calls a proxy of its own, which calls the rollout's URL. Tasks that
need a container are refused, because their harness would run beside the trainer.

The package (extra `verifiers`) is imported when it is first used, which takes seconds.
"""

import itertools
import json
import os
import uuid
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_jax.errors import UserError
from lightning_jax.settings.loading import import_optional, indices_of
from lightning_jax.types import LLM, Task

UNREACHABLE = ("ProviderError", "InterceptionError")  # errors that are not the policy's fault


def load(
    root: str | Path | None,
    split: str,
    cache_dir: Path,
    *,
    taskset: str,
    config: dict[str, Any] | None = None,
    size: int = 1000,
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks among the first `size` of a task set. A fixed fifth is dev.

    `taskset` is an installed module, and `config` has fields of its settings. Raises UserError.
    """
    members = _tasks(taskset, json.dumps(config or {}, sort_keys=True), size)
    if len(members) < 2:
        raise UserError(
            f"the task set {taskset} has {len(members)} tasks; at least 2 are needed.",
            reason="too_few",
            key=taskset,
        )
    tasks = [
        {
            "id": f"{taskset}-{index}",
            "question": members[index].data.prompt_text,
            "taskset": {"name": taskset, "config": config or {}, "size": size, "index": index},
        }
        for index in indices_of(split, len(members))
    ]
    return tasks, {}


async def run(
    task: Mapping[str, Any], llm: LLM, *, harness: str = "null", max_turns: int = 10
) -> dict[str, Any]:
    """Run a task with a harness of the package. Return the sum of its rewards, and its numbers.

    Raises ConnectionError if the policy could not be called.
    """
    vf, origin = _package("verifiers.v1"), task["taskset"]
    members = _tasks(origin["name"], json.dumps(origin["config"], sort_keys=True), origin["size"])
    variable = f"LIGHTNING_KEY_{uuid.uuid4().hex}"  # the package reads keys from the environment
    os.environ[variable] = llm.api_key
    try:
        harness_config = _package("verifiers.v1.utils.loaders").harness_config_type(harness)
        settings = vf.AgentConfig(
            model=llm.model,
            client=vf.EvalClientConfig(base_url=llm.base_url, api_key_var=variable),
            harness=harness_config(id=harness),
            runtime=vf.SubprocessConfig(),
            max_turns=max_turns,
        )
        trace = await vf.Agent(settings).run(members[origin["index"]])
    finally:
        del os.environ[variable]
    if not trace.ok:
        error = trace.errors[-1]
        kind = ConnectionError if error.type in UNREACHABLE else Exception
        raise kind(f"{error.type}: {error.message}")
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward}
    return {**trace.metrics, **rewards, "reward": float(trace.reward)}


@lru_cache(maxsize=16)
def _tasks(taskset: str, config: str, size: int) -> list[Any]:
    """Return the first tasks of a task set. Raises UserError if they cannot run here."""
    loaders = _package("verifiers.v1.utils.loaders")
    try:
        kind = loaders.taskset_class(taskset)
        settings = loaders.taskset_config_type(taskset)(id=taskset, **json.loads(config))
    except Exception as error:  # no such module, no task set in it, or unknown settings
        raise UserError(
            f"the task set {taskset!r} cannot be loaded ({error}); install it, and check "
            "data.options.config.",
            reason="not_loaded",
            key=taskset,
        ) from error
    if kind.task_type().NEEDS_CONTAINER:
        raise UserError.unsupported(
            taskset, f"tasks of {taskset} need a container; use a task set that needs none."
        )
    return list(itertools.islice(kind(settings), size))


def _package(module: str) -> ModuleType:
    """Import a module of the package. Raises UserError if it is not installed, or too old."""
    return import_optional(module, "verifiers>=0.4")
