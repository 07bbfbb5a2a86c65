"""Comparison of runs: settings, curves and tasks. Several runs may be seeds of one experiment."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lightning_jax.rollouts.results.compare_tasks import (
    Rewards,
    TaskComparison,
    compare_tasks,
    standard_error,
)
from lightning_jax.settings import ConfigError
from lightning_jax.studio import Axis
from lightning_jax.studio.evaluation import comparison_table
from lightning_jax.studio.results import read_evaluations
from lightning_jax.studio.runs import REWARD, RunSummary, runs_table
from lightning_jax.studio.tables import Grid, columns
from lightning_jax.system.files import replacing
from lightning_jax.system.text import printable

Group = Sequence[RunSummary]  # seeds of one experiment, often one run

TRAINING_REWARD = "rollout/reward_mean"
MAX_BINS = 12  # lines of the table of training rewards
NOT_COMPARED = ("run_dir",)
SEED = "seed"


def compare_runs(groups: Sequence[Group], axis: Axis = "steps") -> list[Grid]:
    """Return tables that compare the groups with the first one.

    Raises ConfigError if a run is given twice.
    """
    names = group_names(groups)
    tables = [
        runs_table([run for group in groups for run in group], "Runs"),
        settings_table(groups, names),
        _evaluations(groups, names, axis),
        _training(groups, names, axis),
    ]
    for name, group in zip(names[1:], groups[1:], strict=True):
        tables.append(_tasks(groups[0], names[0], group, name))
        if max(len(groups[0]), len(group)) > 1:
            tables.append(seeds_table(groups[0], names[0], group, name))
    return [grid for grid in tables if grid.rows or grid.notes]


def group_names(groups: Sequence[Group]) -> list[str]:
    """Return a short, unique name for each group."""
    short = [_short([Path(run.name).name for run in group]) for group in groups]
    if len(set(short)) == len(short):
        return short
    whole = [_short([run.name for run in group]) for group in groups]
    if len(set(whole)) < len(whole):
        raise ConfigError(
            f"{whole[0]} is given twice; pass different runs.", reason="repeated", key="RUN"
        )
    return whole


def _short(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def settings_table(groups: Sequence[Group], names: Sequence[str]) -> Grid:
    """Return the settings that differ between groups."""
    by_group = [[_compared(run) for run in group] for group in groups]
    keys = sorted({key for group in by_group for found in group for key in found})
    rows = []
    for key in keys:
        cells = [_values(group, key) for group in by_group]
        is_only_seed = key == SEED and any(len(group) > 1 for group in groups)
        if len(set(cells)) > 1 and not is_only_seed:
            rows.append((key, *cells))
    notes = () if rows else ("all settings are equal",)
    if any(not found for group in by_group for found in group):
        notes += ("the settings of a run cannot be read",)
    return Grid("Settings that differ", columns("setting", *names), tuple(rows), notes)


def _compared(run: RunSummary) -> dict[str, str]:
    found = {key: printable(str(value)) for key, value in run.settings.items()}
    found |= {f"content of {key}": digest[:8] for key, digest in run.sources.items()}
    return {key: value for key, value in found.items() if key not in NOT_COMPARED}


def _values(group: Sequence[Mapping[str, str]], key: str) -> str:
    return ", ".join(dict.fromkeys(found.get(key, "") for found in group))


def _evaluations(groups: Sequence[Group], names: Sequence[str], axis: Axis) -> Grid:
    """Return the evaluations of each group. Those of seeds are averaged."""
    cells: dict[float, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for name, group in zip(names, groups, strict=True):
        for run in group:
            for at, row in run.points(REWARD, axis):
                cells[round(at, 1)][name].append(row)
    rows = [(f"{at:g}", *(_evaluation(cells[at][name]) for name in names)) for at in sorted(cells)]
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
            (at, row[TRAINING_REWARD])
            for run in group
            for at, row in run.points(TRAINING_REWARD, axis)
        ]
        for name, group in zip(names, groups, strict=True)
    }
    ends = [at for found in points.values() for at, _ in found]
    if not ends:
        return Grid("", ())
    width = max((max(ends) + 1) / MAX_BINS, 1.0)
    if axis == "steps":
        width = math.ceil(width)
    rows = []
    for index in range(math.floor(max(ends) / width) + 1):
        low, high = index * width, (index + 1) * width
        found = [[reward for at, reward in points[name] if low <= at < high] for name in names]
        label = f"{low:g}" if width == 1 else f"{low:.0f} to {high - (axis == 'steps'):.0f}"
        rows.append((label, *(f"{fmean(values):.3f}" if values else "" for values in found)))
    title = "Reward of the training rollouts"
    return Grid(title, columns(axis, *names, numbers=(axis, *names)), tuple(rows))


@dataclass(frozen=True)
class EvaluationComparison:
    """Tasks of two groups in the last evaluation that both have, or else in their last ones."""

    before_step: int
    after_step: int
    tasks: TaskComparison
    when: str  # such as "step 10"


def compare_evaluations(first: Group, group: Group) -> EvaluationComparison | None:
    """Compare two groups task by task. Return None if one of them has no evaluation."""
    before, after = _measured(first), _measured(group)
    if not before or not after:
        return None
    common = (before.keys() & after.keys()) - {0}  # at step 0 both have the initial model
    old, new = (max(common),) * 2 if common else (max(before), max(after))
    when = f"step {old}" if common else f"step {new} against step {old}"
    return EvaluationComparison(old, new, compare_tasks(before[old], after[new]), when)


def _tasks(first: Group, first_name: str, group: Group, name: str) -> Grid:
    """Return the tasks whose reward differs most."""
    found = compare_evaluations(first, group)
    if found is None:
        nothing = without_evaluation(first, first_name, name)
        return Grid(f"{name} against {first_name}", (), (), (nothing,))
    title = f"{name} against {first_name}, {found.when}"
    grid = comparison_table(found.tasks, title, first_name, name)
    return replace(grid, notes=(*grid.notes, *seed_notes(first, group)))


def without_evaluation(first: Group, first_name: str, name: str) -> str:
    """Return which of two groups, of which one has no evaluation, is that one."""
    has_first = any(read_evaluations(run.directory) for run in first)
    return f"{name if has_first else first_name} has no evaluation"


def seed_notes(first: Group, group: Group) -> tuple[str, ...]:
    """Return a warning if each group is a single run."""
    if len(first) == len(group) == 1:
        return ("one run each: a part of the difference may be the seed (pass seeds as RUN,RUN)",)
    return ()


def _measured(group: Group) -> dict[int, Rewards]:
    """Return the rewards of each task at each evaluated step. Those of seeds are joined."""
    merged: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in group:
        for step, rewards in read_evaluations(run.directory).items():
            for task, values in rewards.items():
                merged[step][task] += values
    return dict(merged)


def seeds_table(first: Group, first_name: str, group: Group, name: str) -> Grid:
    """Return the mean of the last evaluation over seeds, with its standard error."""
    rows, means, errors = [], [], []
    for label, runs in ((first_name, first), (name, group)):
        found = [run.evaluations[-1][REWARD] for run in runs if run.evaluations]
        means.append(fmean(found) if found else math.nan)
        errors.append(standard_error(np.asarray(found)) if len(found) > 1 else math.nan)
        rows.append((label, str(len(found)), _known(means[-1]), _known(errors[-1])))
    difference, error = means[1] - means[0], math.hypot(*errors)
    notes = [f"difference {difference:+.3f}"] * (not math.isnan(difference))
    if notes:
        notes[0] += " (one seed has no error)" if math.isnan(error) else f" ± {error:.3f}"
    numbers = ("seeds", "last reward", "error")
    return Grid("Over seeds", columns("runs", *numbers, numbers=numbers), tuple(rows), tuple(notes))


def _known(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def plot_runs(groups: Sequence[Group], axis: Axis, path: Path) -> None:
    """Draw training and dev rewards of all runs as a PNG. Seeds of a group share a color."""
    from matplotlib.figure import Figure  # takes half a second

    if path.suffix != ".png" or not path.parent.is_dir():
        raise ConfigError(
            f"--png is {str(path)!r}; expected a name that ends in .png in an existing directory.",
            reason="invalid",
            key="--png",
        )
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    panels = ((TRAINING_REWARD, "reward of training rollouts"), (REWARD, "reward on dev tasks"))
    for axes, (metric, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for index, label, run in _labelled(groups):
            points = run.points(metric, axis)
            places, rewards = [at for at, _ in points], [row[metric] for _, row in points]
            style: dict[str, Any] = dict(
                color=f"C{index}", marker="." if metric == TRAINING_REWARD else "o"
            )
            errors = [row.get("eval/reward_stderr", 0.0) for _, row in points]
            if metric == REWARD:
                axes.errorbar(places, rewards, yerr=errors, capsize=3, label=label, **style)
            else:
                axes.plot(places, rewards, linewidth=1, label=label, **style)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(axis)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=100)


def _labelled(groups: Sequence[Group]) -> Iterator[tuple[int, str | None, RunSummary]]:
    """Yield (index of the group, its name for its first run, run)."""
    for index, (name, group) in enumerate(zip(group_names(groups), groups, strict=True)):
        for number, run in enumerate(group):
            yield index, name if number == 0 else None, run
