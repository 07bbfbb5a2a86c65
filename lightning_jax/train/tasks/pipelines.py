"""Tasks and demonstrations of a run's steps, with positions that a checkpoint saves."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rollouts.agents.outcome import finite
from lightning_jax.rollouts.results.metrics import metric_code, split_by
from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import load_function
from lightning_jax.train.config import Config, EvalConfig
from lightning_jax.train.tasks.conversations import call_demonstrations
from lightning_jax.train.tasks.data import evenly_spaced
from lightning_jax.train.tasks.demonstrations import demonstration_sequences
from lightning_jax.train.tasks.difficulty import DifficultySampler
from lightning_jax.train.tasks.stored import Stored, attempt_sequences
from lightning_jax.types import Metrics, Rollout, Task


class Pipelines:
    """Endless pipelines of training tasks and demonstrations, and the fixed dev tasks.

    `baselines` are metrics of the dev tasks. `stored` attempts take the place of
    demonstrations, and `stored_steps` of rollouts.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        train_tasks: Sequence[Task],
        dev_tasks: Sequence[Task],
        stored: Stored | None = None,
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
        demonstrated = [task for task in train_tasks if task["id"] not in probed]
        attempts = stored if config.learn.supervised else None
        self.stored_steps = None if config.learn.supervised else stored
        self._has_attempts, per_step = attempts is not None, warmup.groups_per_step
        groups = attempts or group_tasks(demonstrated, warmup.group_by, warmup.group_size)
        per_step = min(per_step, len(attempts)) if attempts else per_step
        self._groups = TaskIterator(groups, per_step, config.seed + 1)
        self._demonstrate = load_function(warmup.demonstrations) if warmup.demonstrations else None
        self._tokenizer, self._routing = tokenizer, Routing(config.roles, config.policy_table)

    def next_tasks(self, number: int) -> list[Task]:
        """Return the next training tasks."""
        if self._sampler is not None:
            return self._sampler.draw(number)
        while len(self._spare) < number:
            self._spare += next(self._tasks)
        tasks, self._spare = self._spare[:number], self._spare[number:]
        return tasks

    def observe(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Read the rollouts of a step, on which the order of tasks may depend.

        Return metrics of the tasks, none if the order does not depend on rollouts.
        """
        return self._sampler.observe(rollouts) if self._sampler is not None else {}

    def next_demonstrations(self) -> tuple[list[TrainingSequence], Metrics]:
        """Return (sequences of the next supervised step, numbers of tasks and conversations)."""
        groups = next(self._groups)
        items = [item for group in groups for item in group]
        if self._has_attempts:
            sequences = attempt_sequences(groups, self._routing.policies.indices)
            return sequences, _counts(len(groups), len(items))
        assert self._demonstrate is not None, "config checks that a warm-up has demonstrations"
        conversations = call_demonstrations(self._demonstrate, items)
        sequences = demonstration_sequences(conversations, self._tokenizer, self._routing)
        # The function leaves out tasks without a demonstration.
        return sequences, _counts(len(items), len(conversations))

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


def _counts(num_tasks: int, num_conversations: int) -> Metrics:
    counts = {"num_tasks": num_tasks, "num_conversations": num_conversations}
    return {f"train/{name}": float(count) for name, count in counts.items()}


class TaskIterator:
    """Endless shuffled batches of `items`, reshuffled in each pass.

    Batches continue across passes, so all have `batch_size` items. `state()` is a small JSON
    object. After `restore` of it the same batches follow. Without items there is no batch.
    """

    def __init__(self, items: Sequence[Any], batch_size: int, seed: int) -> None:
        self._iterator = None
        if not items:
            return
        pipeline = grain.MapDataset.source(items).seed(seed).shuffle().repeat()
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)
        if batch_size > 1:
            batches = pipeline.batch(batch_size, batch_fn=list)
        else:  # Grain cannot count endless batches of one
            batches = pipeline.map(lambda item: [item])
        self._iterator = iter(batches.to_iter_dataset(options))

    def __next__(self) -> list[Any]:
        if self._iterator is None:
            raise no_tasks()
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        return self._iterator.get_state() if self._iterator else {}

    def restore(self, state: dict[str, Any]) -> None:
        if self._iterator and state:
            self._iterator.set_state(state)


def no_tasks() -> ConfigError:
    """Return the error for a run without training tasks."""
    return ConfigError.empty("data.root", "there are no tasks to train on; check data.root.")


def group_tasks(tasks: Sequence[Task], field: str | None, size: int) -> list[list[Task]]:
    """Group tasks with the same value of `field` into lists of at most `size`, in order.

    If `field` is None, neighbors are grouped. Groups put demonstrations with a long shared prefix
    into one batch, where the prefix is computed once.
    """
    by_value: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_value[json.dumps(task.get(field), default=repr) if field else ""].append(task)
    return [
        members[start : start + size]
        for members in by_value.values()
        for start in range(0, len(members), size)
    ]


def baseline_metrics(config: EvalConfig, tasks: Sequence[Task]) -> Metrics:
    """Return the baselines of the tasks and of their parts, such as `eval/baseline_NAME`.

    Raises ConfigError if the function of `config` fails or returns anything but finite numbers.
    """
    if config.baselines is None or not tasks:
        return {}
    metrics = _baselines(config.baselines, tasks, "")
    for part, members in split_by(config.by, tasks, tasks).items():
        metrics |= _baselines(config.baselines, members, f"/{part}")
    return metrics


def _baselines(reference: str, tasks: Sequence[Task], part: str) -> Metrics:
    try:
        answer = load_function(reference)([dict(task) for task in tasks])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"eval.baselines raised {type(error).__name__}: {error}; mend {reference}.",
            reason="failed",
            key="eval.baselines",
        ) from error
    values = answer if isinstance(answer, Mapping) else {"result": answer}
    numbers = {str(name): finite(value) for name, value in values.items()}
    metrics = {
        f"eval/baseline_{metric_code(name)}{part}": value
        for name, value in numbers.items()
        if value is not None
    }
    if not isinstance(answer, Mapping) or len(metrics) < len(values):
        raise ConfigError.wrong_type(
            "eval.baselines",
            f"eval.baselines returned {answer!r}; return a dict of finite numbers by name.",
        )
    return metrics
