"""Comparison of runs as tables and as a picture of their curves. Pure but for the picture."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_jax.rollouts.results.compare_tasks import TaskComparison
from lightning_jax.settings import ConfigError
from lightning_jax.studio import Axis
from lightning_jax.studio.comparison import (
    Group,
    TaskRow,
    compare_groups,
    group_names,
    task_facts,
)
from lightning_jax.studio.records import Grid, columns
from lightning_jax.studio.runs import REWARD, TRAINING_REWARD, runs_table
from lightning_jax.system.files import replacing
from lightning_jax.system.text import printable

MAX_SHOWN = 10  # tasks in a table, those that differ most
MAX_BINS = 12  # lines of the table of training rewards


def compare_runs(groups: Sequence[Group], axis: Axis = "steps") -> list[Grid]:
    """Return tables that compare the groups with the first one.

    Raises ConfigError if a run is given twice.
    """
    comparison = compare_groups(groups)
    names = [group.name for group in comparison.groups]
    tables = [
        runs_table([run for group in groups for run in group], "Runs"),
        comparison.settings,
        _evaluations(groups, names, axis),
        _training(groups, names, axis),
    ]
    for pair in comparison.pairs:
        before, after = pair.first_name, pair.name
        title = f"{after} against {before}"
        if pair.missing:
            tables.append(Grid(title, (), (), (pair.missing,)))
        else:
            title = f"{title}, {pair.when}"
            tables.append(_tasks_table(title, pair.tasks, before, after, pair.facts))
        tables += [pair.seeds] if pair.seeds else []
    return [grid for grid in tables if grid.rows or grid.notes]


def _evaluations(groups: Sequence[Group], names: Sequence[str], axis: Axis) -> Grid:
    """Return the evaluations of each group. Those of seeds are averaged."""
    cells: dict[float, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for name, group in zip(names, groups, strict=True):
        for run in group:
            for spent, row in run.points(REWARD, axis):
                cells[round(spent, 1)][name].append(row)
    rows = [(f"{x:g}", *(_evaluation(cells[x][name]) for name in names)) for x in sorted(cells)]
    title = "Greedy reward on the dev tasks"
    return Grid(title, columns(axis, *names, numbers=(axis, *names)), tuple(rows))


def _evaluation(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    mean = fmean(row[REWARD] for row in rows)
    if len(rows) > 1:
        return f"{mean:.3f} (n={len(rows)} seeds)"
    return f"{mean:.3f} ± {rows[0].get('eval/reward_stderr', 0.0):.3f}"


def _training(groups: Sequence[Group], names: Sequence[str], axis: Axis) -> Grid:
    """Return the mean reward of training rollouts in equal parts of the axis."""
    points = {
        name: [
            (spent, row[TRAINING_REWARD])
            for run in group
            for spent, row in run.points(TRAINING_REWARD, axis)
        ]
        for name, group in zip(names, groups, strict=True)
    }
    end = max((spent for of_group in points.values() for spent, _ in of_group), default=None)
    if end is None:
        return Grid("", ())
    width = max((end + 1) / MAX_BINS, 1.0)
    if axis == "steps":
        width = math.ceil(width)
    rows = []
    for index in range(math.floor(end / width) + 1):
        low, high = index * width, (index + 1) * width
        rewards = [[reward for x, reward in points[name] if low <= x < high] for name in names]
        label = f"{low:g}" if width == 1 else f"{low:.0f} to {high - (axis == 'steps'):.0f}"
        rows.append((label, *(f"{fmean(values):.3f}" if values else "" for values in rewards)))
    title = "Reward of the training rollouts"
    return Grid(title, columns(axis, *names, numbers=(axis, *names)), tuple(rows))


def comparison_table(
    tasks: TaskComparison, title: str, before: str = "before", after: str = "after"
) -> Grid:
    """Return the tasks of two results that changed most, and what the sign test says."""
    rows = [
        TaskRow(printable(change.task_id), change.before, change.after, change.change)
        for change in tasks.changes
        if change.change
    ]
    return _tasks_table(title, rows, before, after, task_facts(tasks, before, after))


def _tasks_table(
    title: str, rows: Sequence[TaskRow], before: str, after: str, facts: Sequence[str]
) -> Grid:
    notes = list(facts)
    if len(rows) > MAX_SHOWN:
        notes.append(f"only the {MAX_SHOWN} tasks that differ most are shown")
    cells = tuple(
        (row.task_name, f"{row.before:.3f}", f"{row.after:.3f}", f"{row.change:+.3f}")
        for row in rows[:MAX_SHOWN]
    )
    numbers = (before, after, "change")
    head = columns("task", *numbers, numbers=numbers)
    return Grid(title, head, cells, tuple(map(printable, notes)))


def plot_runs(groups: Sequence[Group], axis: Axis, path: Path) -> None:
    """Draw training and dev rewards of all runs as a PNG. Seeds of a group share a color."""
    from matplotlib.figure import Figure  # takes half a second

    if path.suffix != ".png" or not path.parent.is_dir():
        raise ConfigError.invalid(
            "--png",
            f"--png is {str(path)!r}; expected a name that ends in .png in an existing directory.",
        )
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    labelled = [
        (index, name if run is group[0] else None, run)
        for index, (name, group) in enumerate(zip(group_names(groups), groups, strict=True))
        for run in group
    ]
    panels = ((TRAINING_REWARD, "reward of training rollouts"), (REWARD, "reward on dev tasks"))
    for axes, (metric, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for index, label, run in labelled:
            points = run.points(metric, axis)
            spent, rewards = [x for x, _ in points], [row[metric] for _, row in points]
            style: dict[str, Any] = dict(
                color=f"C{index}", marker="." if metric == TRAINING_REWARD else "o"
            )
            errors = [row.get("eval/reward_stderr", 0.0) for _, row in points]
            if metric == REWARD:
                axes.errorbar(spent, rewards, yerr=errors, capsize=3, label=label, **style)
            else:
                axes.plot(spent, rewards, linewidth=1, label=label, **style)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(axis)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=100)
