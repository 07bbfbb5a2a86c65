"""Results of an evaluation: counted, saved as JSON lines, read again, and as a table."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import fsum
from pathlib import Path

from lightning_jax.rollouts.agents.outcome import split_dropped
from lightning_jax.rollouts.results.compare_tasks import Rewards
from lightning_jax.rollouts.results.metrics import eval_metrics, task_rewards
from lightning_jax.settings import ConfigError
from lightning_jax.studio.records import Grid, columns
from lightning_jax.system.files import write_whole
from lightning_jax.system.text import printable
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.traces.tree import from_gateway, is_gateway_call
from lightning_jax.train.directory import STORE
from lightning_jax.train.tasks.record_files import read_records
from lightning_jax.train.watch.findings import findings
from lightning_jax.types import FINISHED, Metrics, Rollout

MAX_COLUMNS = 5  # of components and the agent's own numbers; others are listed below the table
NUMBER = re.compile(r"eval/(reward|agent)_(.+)_mean")  # their names in `eval_metrics`


@dataclass(frozen=True)
class Calls:
    """Number of a rollout's calls, and of its responses that ended at the token limit."""

    number: int
    num_responses: int  # 0 if another server answered
    num_cut: int


@dataclass(frozen=True)
class TaskResult:
    """Rollouts of one task."""

    id: str
    rewards: tuple[float, ...]  # of finished rollouts; a failed agent has earned 0
    num_calls: tuple[int, ...]
    failures: Mapping[str, int]  # number of failed rollouts by reason
    metrics: Mapping[str, float]  # means of the other numbers that the agent returned


def count_calls(store: Store, rollouts: Sequence[Rollout]) -> dict[str, Calls]:
    """Return the calls of each rollout by its id."""
    calls = {}
    for rollout in rollouts:
        spans = [span for span in store.spans(rollout.rollout_id) if from_gateway(span)]
        reasons = [
            reason
            for span in spans
            for reason in span.attributes.get(attributes.RESPONSE_FINISH_REASONS, ())
        ]
        number = sum(map(is_gateway_call, spans))
        calls[rollout.rollout_id] = Calls(number, len(reasons), reasons.count("length"))
    return calls


def task_results(rollouts: Sequence[Rollout], calls: Mapping[str, Calls]) -> list[TaskResult]:
    """Return the result of each task, in the order of the rollouts."""
    by_task: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_task[rollout.task_id].append(rollout)
    rewards = task_rewards(rollouts)
    return [
        TaskResult(
            id=task,
            rewards=tuple(rewards.get(task, ())),
            num_calls=tuple(calls[rollout.rollout_id].number for rollout in members),
            failures=dict(Counter(r.reason for r in members if r.reason is not None)),
            metrics=_mean_metrics(members),
        )
        for task, members in by_task.items()
    ]


def _mean_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each number over finished rollouts, with 0 where it is missing.

    Rollouts whose value was dropped do not count.
    """
    finished = [rollout.metrics for rollout in rollouts if rollout.status in FINISHED]
    names = dict.fromkeys(name for metrics in finished for name in metrics)
    parts = filter(None, (split_dropped(name) for metrics in finished for name in metrics))
    dropped = Counter(metric for _, metric in parts)
    return {
        name: fsum(m.get(name, 0.0) for m in finished) / max(len(finished) - dropped[name], 1)
        for name in names
    }


def write_results(path: Path, results: Sequence[TaskResult]) -> None:
    """Write a line of JSON for each task."""
    write_whole(path, "".join(json.dumps(asdict(result)) + "\n" for result in results))


def read_rewards(path: Path) -> tuple[str, Rewards]:
    """Return (name, rewards of each task) of saved results or of a run's last evaluation.

    Raises UserError if there are none.
    """
    return _of_run(path) if path.is_dir() else (str(path), _of_file(path))


def _of_file(path: Path) -> Rewards:
    by_task: dict[str, list[float]] = {}
    for where, record in read_records(path):
        task, rewards = record.get("id"), record.get("rewards")
        if (
            not isinstance(task, str)
            or not isinstance(rewards, list)
            or not all(isinstance(reward, int | float) for reward in rewards)
        ):
            raise ConfigError.malformed(
                where, f"{where} is no result of a task; expected a file that eval --save wrote."
            )
        by_task[task] = rewards
    return by_task


def _of_run(directory: Path) -> tuple[str, Rewards]:
    evaluations = read_evaluations(directory)
    if not evaluations:
        raise ConfigError.empty(
            str(directory),
            f"{directory} has no evaluation; expected a run with one, or a file that eval --save "
            "wrote.",
        )
    last = max(evaluations)
    return f"{directory}, step {last}", evaluations[last]


def read_evaluations(directory: Path) -> dict[int, Rewards]:
    """Return the rewards of each task in each evaluation of a run, by step."""
    path = directory / STORE
    by_step: dict[int, list[Rollout]] = defaultdict(list)
    if path.is_file():
        with closing(Store(path, read_only=True)) as store:
            for rollout in store.rollouts(phase="eval"):
                if not rollout.superseded:
                    by_step[rollout.step].append(rollout)
    return {
        step: task_rewards(rollouts)
        for step, rollouts in by_step.items()
        if any(rollout.status in FINISHED for rollout in rollouts)
    }


# Its table


def no_call_share(rollouts: Sequence[Rollout], calls: Mapping[str, Calls]) -> float:
    """Return the share of the scored rollouts that made no call."""
    scored = [calls[r.rollout_id] for r in rollouts if r.status == "scored"]
    return sum(of_rollout.number == 0 for of_rollout in scored) / max(len(scored), 1)


def cut_share(rollouts: Sequence[Rollout], calls: Mapping[str, Calls]) -> float | None:
    """Return the share of the responses that ended at the token limit, or None if unknown."""
    parts = [calls[rollout.rollout_id] for rollout in rollouts]
    total = sum(part.num_responses for part in parts)
    return sum(part.num_cut for part in parts) / total if total else None


def learning_notes(
    rollouts: Sequence[Rollout], calls: Mapping[str, Calls], *, has_equal_rewards: bool = False
) -> list[str]:
    """Return what would keep training from learning from such rollouts, as lines."""
    row = {
        "rollout/num_scored": 1.0,  # so that the next number is a share
        "rollout/dropped_no_calls": no_call_share(rollouts, calls),
        "rollout/cut_short_share": cut_share(rollouts, calls) or 0.0,
        "train/equal_groups_share": float(has_equal_rewards),
    }
    return [f"note: {finding.sentence}" for finding in findings(row)]


def evaluation_table(parts: Mapping[str, Sequence[Rollout]], calls: Mapping[str, Calls]) -> Grid:
    """Return a line for each part, such as all rollouts or those of one kind of task.

    The error is the standard error of the mean over tasks.
    """
    metrics = {name: eval_metrics(rollouts) for name, rollouts in parts.items()}
    matches = (NUMBER.fullmatch(name) for of_part in metrics.values() for name in of_part)
    ordered = sorted(filter(None, matches), key=lambda match: match[1] == "agent")
    numbers = {match[0]: match[2] for match in ordered}  # metric to its name in the table
    main, others = list(numbers)[:MAX_COLUMNS], list(numbers)[MAX_COLUMNS:]
    columns_of = [printable(numbers[metric]) for metric in main]
    names = ("n", "reward", "failed", "no call", "calls", "cut", *columns_of)
    rows = []
    for part, row in metrics.items():
        number = sum(calls[rollout.rollout_id].number for rollout in parts[part])
        num_failed = row["eval/num_agent_failures"] + row["eval/num_infrastructure_failures"]
        share, reward = cut_share(parts[part], calls), ""
        if "eval/reward_mean" in row:
            reward = f"{row['eval/reward_mean']:.3f} ± {row['eval/reward_stderr']:.3f}"
        cells = (
            f"{row['eval/num_tasks']:.0f}",
            reward,
            f"{num_failed:.0f}",
            f"{no_call_share(parts[part], calls):.0%}",
            f"{number / max(len(parts[part]), 1):.1f}",
            "" if share is None else f"{share:.0%}",
        )
        rows.append((printable(part), *cells, *(_number(row, name) for name in main)))
    notes = tuple(
        printable(f"{part}: " + "  ".join(f"{numbers[n]} {_number(row, n)}" for n in others))
        for part, row in metrics.items()
        if others
    )
    return Grid("", columns("tasks", *names, numbers=names), tuple(rows), notes)


def _number(metrics: Metrics, name: str) -> str:
    value = metrics.get(name)
    return "" if value is None else f"{value:.3f}"
