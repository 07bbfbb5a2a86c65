"""Messages between a run and its workers, as JSON: one rollout to run, and its outcome."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.outcome import LostGateway, NoReward, Outcome
from lightning_jax.settings import ConfigError
from lightning_jax.types import LLM, Task

# Classes of outcomes by the `kind` of a report.
KINDS: dict[str, type[Outcome]] = {
    "outcome": Outcome,
    "lost_gateway": LostGateway,
    "no_reward": NoReward,
}


@dataclass(frozen=True)
class LeasedWork:
    """Rollout for a worker: its task, the policy's URL, and what the outcome depends on."""

    rollout_id: str
    task: Task
    llm: LLM
    max_abs_reward: float
    max_metrics: int
    traceparent: str | None = None  # of the rollout's span
    # Paths in the task that exist for the run, by field. The worker must see them, too.
    paths: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the work as JSON. Raises ConfigError for a task that has no such form."""
        fields = {name: value for name, value in vars(self).items() if name not in ("task", "llm")}
        try:
            return json.dumps({**fields, "llm": asdict(self.llm), "task": self.task})
        except (TypeError, ValueError, RecursionError):
            raise unsendable(self.task) from None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "LeasedWork":
        return cls(**{**body, "llm": LLM(**body["llm"])})

    @property
    def limits(self) -> RolloutConfig:
        return RolloutConfig(max_abs_reward=self.max_abs_reward, max_metrics=self.max_metrics)


def existing_paths(task: Task) -> dict[str, str]:
    """Return the fields of the task that name an existing file or folder absolutely."""
    texts = ((name, value) for name, value in task.items() if isinstance(value, str))
    return {str(n): path for n, path in texts if os.path.isabs(path) and os.path.exists(path)}


def missing_path(work: LeasedWork, worker: str) -> Outcome | None:
    """Return the failure of work whose task names a path that this machine lacks, or None."""
    for name, path in work.paths.items():
        if not os.path.exists(path):
            return Outcome(
                "infrastructure_failure",
                reason="path_not_found",
                detail=f"task field {name!r} names {path}, which the run has and worker {worker} "
                "does not; mount or copy it to the worker's machine at the same path",
            )
    return None


def first_unsendable(tasks: Iterable[Task]) -> Task | None:
    """Return the first task that has no JSON form, or None."""
    for task in tasks:
        try:
            json.dumps(task)
        except (TypeError, ValueError, RecursionError):
            return task
    return None


def unsendable(task: Task) -> ConfigError:
    """Return the error for a task that cannot be sent to a worker."""
    values = ((name, first_unsendable([{"": value}]), value) for name, value in task.items())
    named = [f"a {type(value).__name__} as {name!r}" for name, found, value in values if found]
    return ConfigError(
        f"task {task.get('id')!r} has {named[0] if named else 'a field'}, which is no JSON and "
        "cannot be sent to a worker; make it a text, a number, a list or a dict, or set "
        "agent.workers=0.",
        reason="not_json",
        key=str(task.get("id")),
    )


def as_report(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as a worker reports it."""
    kind = next(kind for kind, found in KINDS.items() if type(outcome) is found)
    return {"kind": kind, **outcome.fields}


def stopped() -> Outcome:
    """Return the outcome of work that its worker gives back."""
    return Outcome(
        "infrastructure_failure",
        reason="worker_stopped",
        detail="its worker was stopped and gave the rollout back",
    )
