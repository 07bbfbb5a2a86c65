"""Comparison of runs: settings, curves and tasks. Several runs may be seeds of one experiment.

The live page shows these records, and `comparison_tables.py` makes tables of them.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from lightning_jax.rollouts.results.compare_tasks import (
    Rewards,
    TaskComparison,
    compare_tasks,
    standard_error,
)
from lightning_jax.settings import ConfigError
from lightning_jax.studio.build import task_name
from lightning_jax.studio.evaluation import read_evaluations
from lightning_jax.studio.records import AttemptView, Grid, Verdict, attempt_view, columns
from lightning_jax.studio.runs import REWARD, RunSummary
from lightning_jax.system.text import printable
from lightning_jax.traces.listing import Filter, StoreListing
from lightning_jax.train.directory import STORE

Group = Sequence[RunSummary]  # seeds of one experiment, often one run

MAX_CHANGES = 200  # tasks of a comparison, those that differ most
MAX_EVALUATED = 20_000  # rollouts of one evaluation in which those of a task are searched
SIGNIFICANT = 0.05  # p-value of the sign test
NOT_COMPARED = ("run_dir",)
SEED = "seed"


@dataclass(frozen=True)
class GroupView:
    """Runs that count as seeds of one experiment."""

    name: str
    runs: tuple[RunSummary, ...]


@dataclass(frozen=True)
class TaskRow:
    """One task whose reward differs, with its attempts in both groups."""

    task_name: str
    before: float
    after: float
    change: float
    before_rollouts: tuple[AttemptView, ...] = ()
    after_rollouts: tuple[AttemptView, ...] = ()


@dataclass(frozen=True)
class Pair:
    """One group against the first, task by task and over seeds.

    The tasks are those of the last evaluation that both have, or else of their last ones.
    """

    name: str
    first_name: str
    seeds: Grid | None  # None: one run each
    missing: str = ""  # who has no evaluation; then the rest is empty
    when: str = ""  # such as "step 10"
    verdict: Verdict | None = None
    facts: tuple[str, ...] = ()
    num_won: int = 0
    num_lost: int = 0
    num_equal: int = 0
    p_value: float = 1.0
    tasks: tuple[TaskRow, ...] = ()  # largest change first


@dataclass(frozen=True)
class RunComparison:
    """Groups of runs, each compared with the first."""

    groups: tuple[GroupView, ...]
    settings: Grid
    pairs: tuple[Pair, ...]


def compare_groups(groups: Sequence[Group]) -> RunComparison:
    """Compare the groups with the first one. Raises ConfigError if a run is given twice."""
    names = group_names(groups)
    return RunComparison(
        tuple(GroupView(name, tuple(group)) for name, group in zip(names, groups, strict=True)),
        settings_table(groups, names),
        tuple(
            _pair(groups[0], names[0], group, name)
            for name, group in zip(names[1:], groups[1:], strict=True)
        ),
    )


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
    keys = sorted({key for group in by_group for settings in group for key in settings})
    rows = []
    for key in keys:
        cells = [", ".join(dict.fromkeys(run.get(key, "") for run in group)) for group in by_group]
        is_only_seed = key == SEED and any(len(group) > 1 for group in groups)
        if len(set(cells)) > 1 and not is_only_seed:
            rows.append((key, *cells))
    notes = () if rows else ("all settings are equal",)
    if not all(settings for group in by_group for settings in group):
        notes += ("the settings of a run cannot be read",)
    return Grid("Settings that differ", columns("setting", *names), tuple(rows), notes)


def _compared(run: RunSummary) -> dict[str, str]:
    settings = {key: printable(str(value)) for key, value in run.settings.items()}
    settings |= {f"content of {key}": digest[:8] for key, digest in run.sources.items()}
    return {key: value for key, value in settings.items() if key not in NOT_COMPARED}


# Tasks


def _pair(first: Group, first_name: str, group: Group, name: str) -> Pair:
    has_seeds = max(len(first), len(group)) > 1
    pair = Pair(
        name, first_name, seeds_table(first, first_name, group, name) if has_seeds else None
    )
    before, after = _measured(first), _measured(group)
    if not before or not after:
        return replace(pair, missing=f"{name if before else first_name} has no evaluation")
    common = (before.keys() & after.keys()) - {0}  # at step 0 both have the initial model
    old, new = (max(common),) * 2 if common else (max(before), max(after))
    tasks = compare_tasks(before[old], after[new])
    facts = task_facts(tasks, first_name, name)
    if not has_seeds:
        facts.append(
            "one run each: a part of the difference may be the seed (pass seeds as RUN,RUN, or as "
            "one group of the page)"
        )
    changes = [change for change in tasks.changes if change.change][:MAX_CHANGES]
    task_ids = {change.task_id for change in changes}
    names_before, of_before = _attempts(first, old, task_ids)
    names_after, of_after = _attempts(group, new, task_ids)
    task_names = names_after | names_before
    return replace(
        pair,
        when=f"step {old}" if common else f"step {new} against step {old}",
        verdict=_verdict(tasks, first_name, name),
        facts=tuple(facts),
        num_won=tasks.num_won,
        num_lost=tasks.num_lost,
        num_equal=tasks.num_equal,
        p_value=tasks.p_value,
        tasks=tuple(
            TaskRow(
                task_names.get(change.task_id, printable(change.task_id)),
                *(change.before, change.after, change.change),
                tuple(of_before[change.task_id]),
                tuple(of_after[change.task_id]),
            )
            for change in changes
        ),
    )


def _attempts(
    group: Group, step: int, task_ids: set[str]
) -> tuple[dict[str, str], dict[str, list[AttemptView]]]:
    """Return the names of tasks, and their attempts in the evaluation of a step, by task id."""
    names: dict[str, str] = {}
    attempts: dict[str, list[AttemptView]] = defaultdict(list)
    for run in group:
        if not (run.directory / STORE).is_file():
            continue
        with closing(StoreListing(run.directory / STORE)) as listing:
            evaluated = listing.rollouts(Filter(phase="eval", step=step), limit=MAX_EVALUATED)
            here = [rollout for rollout in evaluated if rollout.task_id in task_ids]
            examples = {rollout.task_id: rollout.rollout_id for rollout in here}
            fields = listing.tasks(list(examples.values()))
        names |= {task: task_name(task, fields.get(name, {})) for task, name in examples.items()}
        for rollout in here:
            attempts[rollout.task_id].append(attempt_view(rollout, run.key))
    return names, attempts


def task_facts(tasks: TaskComparison, before: str, after: str) -> list[str]:
    """Return the number of tasks, the change of the reward, and what the sign test says."""
    facts = [f"{len(tasks.changes)} common tasks"]
    if tasks.num_only_before or tasks.num_only_after:
        facts[0] += (
            f"; {tasks.num_only_before} only in {before}, {tasks.num_only_after} only in {after}"
        )
    if tasks.change_mean is not None:
        chance = "rarely splits" if tasks.p_value < SIGNIFICANT else "may split"
        facts.append(
            f"reward {tasks.change_mean:+.3f} ± {tasks.change_stderr:.3f}; {tasks.num_won} won, "
            f"{tasks.num_lost} lost, {tasks.num_equal} equal; chance alone {chance} them so "
            f"unevenly (sign test, p = {tasks.p_value:.2g})"
        )
    return facts


def _verdict(tasks: TaskComparison, first_name: str, name: str) -> Verdict:
    """Return whether the group is better, as the sign test says."""
    if not tasks.changes:
        return Verdict(0, f"{name} and {first_name} were evaluated on different tasks")
    if tasks.p_value >= SIGNIFICANT:
        return Verdict(0, f"no clear difference between {name} and {first_name}")
    sign = 1 if tasks.num_won > tasks.num_lost else -1
    return Verdict(sign, f"{name} is {'better' if sign > 0 else 'worse'} than {first_name}")


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
        rewards = [run.evaluations[-1][REWARD] for run in runs if run.evaluations]
        means.append(fmean(rewards) if rewards else math.nan)
        errors.append(standard_error(np.asarray(rewards)) if len(rewards) > 1 else math.nan)
        cells = ("" if math.isnan(x) else f"{x:.3f}" for x in (means[-1], errors[-1]))
        rows.append((label, str(len(rewards)), *cells))
    difference, error = means[1] - means[0], math.hypot(*errors)
    notes = [f"difference {difference:+.3f}"] * (not math.isnan(difference))
    if notes:
        notes[0] += " (one seed has no error)" if math.isnan(error) else f" ± {error:.3f}"
    numbers = ("seeds", "last reward", "error")
    return Grid("Over seeds", columns("runs", *numbers, numbers=numbers), tuple(rows), tuple(notes))
