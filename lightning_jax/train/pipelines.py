"""Tasks and demonstrations of a run's steps, with positions that a checkpoint saves."""

from collections.abc import Sequence
from typing import Any

from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.loading import load_function
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.train.baselines import baseline_metrics
from lightning_jax.train.config import Config
from lightning_jax.train.conversations import call_demonstrations
from lightning_jax.train.data import evenly_spaced
from lightning_jax.train.demonstrations import demonstration_sequences
from lightning_jax.train.difficulty import DifficultySampler
from lightning_jax.train.tasks import TaskIterator, group_tasks
from lightning_jax.types import Metrics, Rollout, Task


class Pipelines:
    """Endless pipelines of training tasks and demonstrations, and the fixed dev tasks.

    `baselines` are metrics of the dev tasks.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        train_tasks: Sequence[Task],
        dev_tasks: Sequence[Task],
    ) -> None:
        warmup = config.warmup
        self.dev_tasks = evenly_spaced(dev_tasks, config.eval.num_tasks)
        self.baselines = baseline_metrics(config.eval, self.dev_tasks)
        self.tasks_by_id = {task["id"]: task for task in train_tasks}
        self._tasks = TaskIterator(train_tasks, config.rollout.tasks_per_step, config.seed)
        self._spare: list[Task] = []  # drawn from `_tasks` but not used yet
        data, self._sampler = config.data, None  # None: `_tasks` gives the order
        if data.sampler == "difficulty":
            self._sampler = DifficultySampler(train_tasks, data.difficulty, config.seed)
        self.probe_tasks: list[Task] = []  # of which no demonstration is shown
        if warmup.stop.every:
            at_most = min(warmup.stop.num_tasks, len(train_tasks) // 2)
            self.probe_tasks = evenly_spaced(train_tasks, at_most)
        probed = {task["id"] for task in self.probe_tasks}
        shown = [task for task in train_tasks if task["id"] not in probed]
        groups = group_tasks(shown, warmup.group_by, warmup.group_size)
        self._groups = TaskIterator(groups, warmup.groups_per_step, config.seed + 1)
        self._demonstrate = load_function(warmup.demonstrations) if warmup.demonstrations else None
        self._tokenizer, self._routing = tokenizer, Routing(config.roles, config.policies)

    def next_tasks(self, number: int) -> list[Task]:
        """Return the next training tasks."""
        if self._sampler is not None:
            return self._sampler.draw(number)
        while len(self._spare) < number:
            self._spare += next(self._tasks)
        taken, self._spare = self._spare[:number], self._spare[number:]
        return taken

    def observe(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Read the rollouts of a step, on which the order of tasks may depend.

        Return metrics of the tasks, none if the order does not depend on rollouts.
        """
        return self._sampler.observe(rollouts) if self._sampler is not None else {}

    def next_demonstrations(self) -> tuple[list[TrainingSequence], Metrics]:
        """Return (sequences of the next warm-up step, numbers of its tasks and conversations)."""
        assert self._demonstrate is not None, "config checks that a warm-up has demonstrations"
        tasks = [task for group in next(self._groups) for task in group]
        conversations = call_demonstrations(self._demonstrate, tasks)
        # The function leaves out tasks without a demonstration.
        counts = {"num_tasks": len(tasks), "num_conversations": len(conversations)}
        sequences = demonstration_sequences(conversations, self._tokenizer, self._routing)
        return sequences, {f"train/{name}": float(count) for name, count in counts.items()}

    def as_now(self, task: Task) -> Task:
        """Return a saved task as it is now: a path or a URL in it may have changed."""
        return self.tasks_by_id.get(task["id"], task)

    def progress(self) -> dict[str, Any]:
        """Return the positions as a JSON object."""
        sampler = {} if self._sampler is None else {"difficulty": self._sampler.state()}
        return sampler | {
            "tasks": self._tasks.state(),
            "spare_tasks": list(self._spare),
            "demonstrations": self._groups.state(),
        }

    def restore(self, progress: dict[str, Any] | None) -> None:
        """Continue at the positions of `progress`. Without it, stay at the beginning."""
        if progress is None:
            return
        self._tasks.restore(progress["tasks"])
        self._spare = [self.as_now(task) for task in progress.get("spare_tasks", [])]
        self._groups.restore(progress["demonstrations"])
        if self._sampler is not None and "difficulty" in progress:
            self._sampler.restore(progress["difficulty"])
