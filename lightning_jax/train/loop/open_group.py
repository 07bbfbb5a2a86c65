"""Group from outside that still takes rollouts."""

import hashlib
import json
from dataclasses import dataclass, field

from lightning_jax.train.tasks.source import Key
from lightning_jax.types import Rollout, Task


@dataclass(eq=False)
class OpenGroup:
    """Group that still takes rollouts, or whose rollouts still run."""

    key: Key
    name: str | None
    task: Task
    size: int
    finished: dict[int, Rollout] = field(default_factory=dict)  # by index
    free: list[tuple[int, int]] = field(default_factory=list)  # index and attempt, to try again
    num_begun: int = 0  # indices in use
    version: int = field(init=False)  # of the newest call of a finished rollout
    digest: str = field(init=False)  # of the task

    def __post_init__(self) -> None:
        self.version = self.key[0]
        self.digest = task_digest(self.task)

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.size

    @property
    def is_running(self) -> bool:
        """True if a rollout runs, so that new calls may come."""
        return self.num_begun > len(self.finished) + len(self.free)

    def take_place(self) -> tuple[int, int] | None:
        """Return the index and attempt of the next rollout, or None if there is no place."""
        if self.free:
            return self.free.pop(0)
        if self.num_begun == self.size:
            return None
        self.num_begun += 1
        return self.num_begun - 1, 1

    def finish(self, rollout: Rollout, version: int) -> None:
        """Add a finished rollout. `version` is that of its newest call."""
        self.finished[rollout.index] = rollout
        self.version = max(self.version, version)

    def give_up(self, index: int, attempt: int) -> None:
        """Free the place of an attempt without a result."""
        self.free.append((index, attempt + 1))


def task_digest(task: Task) -> str:
    """Return a digest of the task as JSON, in which the store keeps it."""
    text = json.dumps(task, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()
