"""Messages between a run and its workers, as JSON: one rollout to run, and its outcome.

Digests of the agent that settings name compare a worker's with the run's.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_jax.gateway.sessions.work_messages import STOPPED, Report
from lightning_jax.rollouts.agents.outcome import (
    BAD_REWARD,
    LostGateway,
    NoReward,
    Outcome,
    kept_metrics,
    outcome_of,
)
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.settings import ConfigError
from lightning_jax.settings.paths import file_of
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
    named = [f"a {type(value).__name__} as {name!r}" for name, item, value in values if item]
    return ConfigError(
        f"task {task.get('id')!r} has {named[0] if named else 'a field'}, which is no JSON and "
        "cannot be sent to a worker; make it a text, a number, a list or a dict, or set "
        "agent.workers=0.",
        reason="not_json",
        key=str(task.get("id")),
    )


def as_report(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as a worker reports it."""
    kind = next(kind for kind, of_kind in KINDS.items() if type(outcome) is of_kind)
    return {"kind": kind, **outcome.fields}


def stopped() -> Outcome:
    """Return the outcome of work that its worker gives back."""
    return Outcome(
        "infrastructure_failure",
        reason=STOPPED,
        detail="its worker was stopped and gave the rollout back",
    )


def outcome_of_report(report: Report, config: RolloutConfig) -> Outcome:
    """Return the outcome that is reported, with the limits of this run."""
    if report.reward is not None:
        checked = outcome_of(report.reward, config)
        if checked.reason == BAD_REWARD:
            return checked
    metrics = kept_metrics(report.metrics or {}, config.max_metrics)
    kind = KINDS[report.kind]
    return kind(report.status, report.reward, report.reason, report.detail, metrics)


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
