"""Answers that compare runs: settings, tasks won and lost, and how sure the difference is."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.rollouts.results.compare_tasks import TaskChange, TaskComparison
from lightning_jax.studio.build import task_name
from lightning_jax.studio.compare_runs import (
    EvaluationComparison,
    compare_evaluations,
    group_names,
    seeds_table,
    settings_table,
    without_evaluation,
)
from lightning_jax.studio.evaluation import SIGNIFICANT
from lightning_jax.studio.live.answers import Json, run_line
from lightning_jax.studio.live.catalog import WatchedRun
from lightning_jax.studio.runs import RunSummary
from lightning_jax.studio.tables import Grid
from lightning_jax.traces.listing import Filter
from lightning_jax.types import Rollout

Pair = tuple[WatchedRun, RunSummary]

MAX_RUNS = 16
MAX_CHANGES = 200  # tasks in one answer, those that differ most
MAX_EVALUATED = 20_000  # rollouts of one evaluation in which those of a task are searched


def compare_answer(groups: Sequence[Sequence[WatchedRun]]) -> Json:
    """Compare the groups with the first one. Runs of one group are seeds of one experiment.

    Raises InvalidValue for fewer than two groups or too many runs, ConfigError if a run is given
    twice.
    """
    num_runs = sum(map(len, groups))
    if len(groups) < 2 or num_runs > MAX_RUNS:
        raise InvalidValue(
            f"{num_runs} runs in {len(groups)} groups cannot be compared; choose 2 to {MAX_RUNS} "
            "runs in at least two groups.",
            reason="out_of_range",
            key="group",
        )
    read = [[(run, run.summary()) for run in group] for group in groups]
    summaries = [[summary for _, summary in group] for group in read]
    names = group_names(summaries)
    return {
        "groups": [
            {"name": name, "runs": [run_line(run, summary) for run, summary in group]}
            for name, group in zip(names, read, strict=True)
        ],
        "settings": _grid(settings_table(summaries, names)),
        "pairs": [
            _pair(read[0], names[0], group, name)
            for name, group in zip(names[1:], read[1:], strict=True)
        ],
    }


def _grid(grid: Grid) -> Json:
    return {
        "columns": [[column.name, column.is_number] for column in grid.columns],
        "rows": grid.rows,
        "notes": grid.notes,
    }


def _pair(first: Sequence[Pair], first_name: str, group: Sequence[Pair], name: str) -> Json:
    """Compare one group with the first, task by task and over seeds."""
    before, after = [summary for _, summary in first], [summary for _, summary in group]
    has_seeds = max(len(before), len(after)) > 1
    seeds = seeds_table(before, first_name, after, name) if has_seeds else None
    pair = {"name": name, "first_name": first_name, "seeds": seeds and _grid(seeds)}
    found = compare_evaluations(before, after)
    if found is None:
        missing = without_evaluation(before, first_name, name)
        return pair | {"missing": f"{missing}, so no tasks can be compared"}
    return pair | {
        "missing": None,
        "verdict": _verdict(found.tasks, first_name, name),
        "facts": _facts(found, first_name, name, has_seeds),
        "num_won": found.tasks.num_won,
        "num_lost": found.tasks.num_lost,
        "num_equal": found.tasks.num_equal,
        "p_value": found.tasks.p_value,
        "tasks": _tasks(found, first, group),
    }


def _verdict(found: TaskComparison, first_name: str, name: str) -> Json:
    """Return what the sign test says, as a sentence and whether it is for or against."""
    if not found.changes:
        return {"sign": 0, "text": f"{name} and {first_name} were evaluated on different tasks"}
    if found.p_value >= SIGNIFICANT:
        return {"sign": 0, "text": f"no clear difference between {name} and {first_name}"}
    sign = 1 if found.num_won > found.num_lost else -1
    return {
        "sign": sign,
        "text": f"{name} is {'better' if sign > 0 else 'worse'} than {first_name}",
    }


def _facts(
    found: EvaluationComparison, first_name: str, name: str, has_seeds: bool
) -> Sequence[str]:
    tasks = found.tasks
    facts = [f"{len(tasks.changes)} tasks that both were evaluated on, {found.when}"]
    if tasks.num_only_before or tasks.num_only_after:
        facts.append(
            f"left out: {tasks.num_only_before} tasks of {first_name} alone, "
            f"{tasks.num_only_after} of {name} alone"
        )
    if tasks.change_mean is not None and tasks.change_stderr is not None:
        facts.append(
            f"mean change of the reward {tasks.change_mean:+.3f} ± {tasks.change_stderr:.3f} "
            "(standard error over tasks)"
        )
    num_changed = tasks.num_won + tasks.num_lost
    if num_changed:
        facts.append(
            f"if both were equally good, chance alone would split {num_changed} tasks so unevenly "
            f"in {100 * tasks.p_value:.2g} % of all cases (sign test, p = {tasks.p_value:.2g})"
        )
    if not has_seeds:
        facts.append(
            "one run each, so a part of the difference may be the seed; choose more runs with "
            "other seeds, and give those of one experiment the same group"
        )
    return facts


# Tasks won and lost


def _tasks(
    found: EvaluationComparison, first: Sequence[Pair], group: Sequence[Pair]
) -> Sequence[Json]:
    """Return the tasks whose reward differs, with their rollouts in both groups."""
    changes = [change for change in found.tasks.changes if not math.isclose(change.change, 0.0)]
    changes = changes[:MAX_CHANGES]
    wanted = {change.task_id for change in changes}
    before, names = _rollouts(first, found.before_step, wanted)
    after, more = _rollouts(group, found.after_step, wanted)
    return [_task(change, before, after, names | more) for change in changes]


def _task(
    change: TaskChange,
    before: Mapping[str, Sequence[Json]],
    after: Mapping[str, Sequence[Json]],
    names: Mapping[str, str],
) -> Json:
    return {
        "task_name": names.get(change.task_id, ""),
        "before": change.before,
        "after": change.after,
        "change": change.change,
        "before_rollouts": before.get(change.task_id, ()),
        "after_rollouts": after.get(change.task_id, ()),
    }


def _rollouts(
    group: Sequence[Pair], step: int, wanted: set[str]
) -> tuple[Mapping[str, Sequence[Json]], dict[str, str]]:
    """Return the rollouts of each task in the evaluation of a step, and the tasks' names."""
    found: dict[str, list[Json]] = defaultdict(list)
    names: dict[str, str] = {}
    for run, _ in group:
        with run.listing() as listing:
            evaluated = listing.rollouts(Filter(phase="eval", step=step), limit=MAX_EVALUATED)
            here = [rollout for rollout in evaluated if rollout.task_id in wanted]
            examples = {rollout.task_id: rollout.rollout_id for rollout in here}
            fields = listing.tasks(list(examples.values()))
        for rollout in here:
            found[rollout.task_id].append(_reference(run, rollout))
        for task, rollout_id in examples.items():
            names[task] = task_name(task, fields.get(rollout_id, {}))
    return found, names


def _reference(run: WatchedRun, rollout: Rollout) -> dict[str, Any]:
    return {
        "key": run.key,
        "rollout_id": rollout.rollout_id,
        "status": rollout.status,
        "reward": rollout.reward,
    }
