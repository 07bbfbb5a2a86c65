"""Reader of run directories, with a summary of each."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from lightning_jax.errors import UserError
from lightning_jax.settings import ConfigError, flatten, read_saved
from lightning_jax.studio import Axis
from lightning_jax.studio.records import Grid, columns
from lightning_jax.system.text import printable
from lightning_jax.traces.listing import StoreListing
from lightning_jax.train.directory import (
    LOCK,
    METRICS,
    SETTINGS,
    SOURCES,
    STORE,
    is_locked,
    read_end,
    require_run,
)
from lightning_jax.train.watch.metrics import Row, read_rows
from lightning_jax.train.watch.report import NOTHING_TRAINED, is_untrained

Status = Literal["running", "finished", "stopped", "failed", "unreadable"]

MAX_PARSED = 256  # settings that are kept in memory
MAX_DEPTH = 5  # of a run below the folder that is searched
REWARD, TRAINING_REWARD = "eval/reward_mean", "rollout/reward_mean"


@dataclass(frozen=True)
class RunSummary:
    """One run directory. A number that is not known is None."""

    json_fields: ClassVar = (
        *("key", "name", "status", "why", "num_steps", "total_steps", "minutes", "started_s"),
        *("model", "rollouts", "failed_share", "is_evaluated", "first", "best", "last"),
    )

    directory: Path
    name: str  # path below the folder that was searched
    status: Status
    why: str  # reason of a failure, or that a finished run trained nothing, else ""
    rows: tuple[Row, ...]  # of metrics.jsonl
    settings: Mapping[str, Any]  # by dotted key; empty if they cannot be read
    sources: Mapping[str, str]  # digests of the agent's file and the tasks
    rollouts: Mapping[str, int]  # number by status
    started_s: float | None  # since the epoch

    @property
    def key(self) -> str:
        return run_key(self.directory)

    @property
    def num_steps(self) -> int:
        """Number of steps done."""
        return max((int(row["step"]) + 1 for row in self.rows if "time/step_s" in row), default=0)

    @property
    def total_steps(self) -> int | None:
        """Number of steps that the settings ask for."""
        return _total_steps(self.settings)

    @property
    def minutes(self) -> float:
        return _minutes(self.rows)

    def spent(self, axis: Axis) -> list[float]:
        """Return what had been spent before each of `rows`: steps, training rollouts or minutes."""
        if axis == "steps":
            return [float(row["step"]) for row in self.rows]
        of_rows = {
            "samples": lambda row: row.get("rollout/num_rollouts", 0.0),
            "minutes": lambda row: _minutes([row]),
        }[axis]
        return list(itertools.accumulate(map(of_rows, self.rows), initial=0.0))[:-1]

    def points(self, metric: str, axis: Axis = "steps") -> list[tuple[float, Row]]:
        """Return (what had been spent, row) of the rows with this metric."""
        pairs = zip(self.spent(axis), self.rows, strict=True)
        return [(spent, row) for spent, row in pairs if metric in row]

    @property
    def evaluations(self) -> tuple[Row, ...]:
        """Rows with an evaluation. Row s is of the weights before step s."""
        return tuple(row for row in self.rows if REWARD in row)

    @property
    def is_evaluated(self) -> bool:
        return bool(self.evaluations)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the evaluations, or of the training rollouts if there were none."""
        name = REWARD if self.is_evaluated else TRAINING_REWARD
        return [row[name] for row in self.rows if name in row]

    @property
    def first(self) -> float | None:
        return self.rewards[0] if self.rewards else None

    @property
    def best(self) -> float | None:
        return max(self.rewards, default=None)

    @property
    def last(self) -> float | None:
        return self.rewards[-1] if self.rewards else None

    @property
    def model(self) -> str:
        return printable(str(self.settings.get("model.name", "")))

    @property
    def failed_share(self) -> float | None:
        """Share of the finished rollouts that failed, by the agent or by the infrastructure."""
        failed = sum(n for status, n in self.rollouts.items() if status.endswith("_failure"))
        finished = failed + self.rollouts.get("scored", 0)
        return failed / finished if finished else None


def run_key(directory: Path) -> str:
    """Return the name of a run in addresses of the page."""
    return hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]


def find_runs(folder: Path) -> list[RunSummary]:
    """Return the runs in a folder, or the one whose directory it is, newest first.

    Raises ConfigError if there is none.
    """
    runs = [_readable(path, name) for path, name in find_run_dirs([folder])]
    return sorted(runs, key=lambda run: -(run.started_s or 0.0))


def _readable(directory: Path, name: str) -> RunSummary:
    """Return the summary of a run, or a line about it if it cannot be read."""
    try:
        return read_run(directory, name)
    except (UserError, OSError) as error:
        nothing: Mapping[str, Any] = MappingProxyType({})
        why = printable(str(error))
        return RunSummary(
            directory, printable(name), "unreadable", why, (), nothing, nothing, nothing, None
        )


def read_run(directory: Path, name: str | None = None) -> RunSummary:
    """Read a run directory. Raises ConfigError if it is none."""
    require_run(directory, SETTINGS)
    settings = _settings(directory / SETTINGS)
    counts, started_s = _stored(directory)
    rows, num_damaged = read_rows(directory / METRICS)
    status, why = _status(directory, rows, settings, counts)
    if status == "finished" and is_untrained(rows):
        why = NOTHING_TRAINED
    if num_damaged:
        why = "; ".join(filter(None, (why, f"{METRICS} has {num_damaged} damaged lines")))
    return RunSummary(
        directory=directory,
        name=printable(name or str(directory)),
        status=status,
        why=printable(why),
        rows=tuple(rows),
        settings=settings,
        sources=_sources(directory),
        rollouts=counts,
        started_s=started_s,
    )


def runs_table(runs: Sequence[RunSummary], title: str = "") -> Grid:
    """Return a table with a line per run."""
    numbers = ("steps", "minutes", "first", "best", "last", "rollouts", "failed")
    names = ("run", "status", "steps", "started", "minutes", "model", *numbers[2:])
    notes = ["first, best, last: greedy reward on the dev tasks"] * any(
        run.is_evaluated for run in runs
    )
    if any(run.rewards and not run.is_evaluated for run in runs):
        notes.append("*: mean reward of the training rollouts, as the run has no evaluation")
    notes += [f"{run.name}: {run.why}" for run in runs if run.why]
    head = columns(*names, numbers=numbers, can_drop=("model", "started", "first"))
    return Grid(title, head, tuple(map(_cells, runs)), tuple(notes))


def _cells(run: RunSummary) -> tuple[str, ...]:
    total = "" if run.total_steps is None else f" of {run.total_steps}"
    started = time.localtime(run.started_s) if run.started_s else None
    share, sign = run.failed_share, "" if run.is_evaluated else "*"
    rewards = (run.first, run.best, run.last)
    return (
        run.name,
        run.status,
        f"{run.num_steps}{total}",
        time.strftime("%Y-%m-%d %H:%M", started) if started else "",
        f"{run.minutes:.1f}",
        Path(run.model).name,
        *("" if reward is None else f"{reward:.3f}{sign}" for reward in rewards),
        str(sum(run.rollouts.values())),
        "" if share is None else f"{share:.1%}" if share else "0%",
    )


def find_run_dirs(folders: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return the run directories in folders, and their names there.

    Raises ConfigError if a folder does not exist, or if there is no run.
    """
    fix = "pass the folder that holds your runs, or start one with `lightning-jax train`."
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError.not_found(str(folder), f"{folder} is no directory; {fix}")
    if not (paths := [path for folder in folders for path in run_dirs(folder)]):
        names = ", ".join(map(str, folders))
        raise ConfigError.empty(names, f"{names}: no run there; {fix}")
    return paths


def run_dirs(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the run directories in a folder, and their names there.

    A run's own folders are not searched.
    """
    for path, names, files in os.walk(folder):
        if SETTINGS in files and {STORE, LOCK, METRICS} & set(files):
            names.clear()
            run = Path(path)
            yield run, str(run if run == folder else run.relative_to(folder))
        elif len(Path(path).relative_to(folder).parts) >= MAX_DEPTH:
            names.clear()
        else:
            names[:] = sorted(name for name in names if not name.startswith("."))


def _settings(path: Path) -> Mapping[str, Any]:
    """Return the settings by dotted key, or {} if they cannot be read."""
    try:
        stat = path.stat()
    except OSError:
        return {}
    return _parsed(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(maxsize=MAX_PARSED)
def _parsed(path: Path, stamp: tuple[int, int, int]) -> Mapping[str, Any]:
    """Parse a file of settings once, as this takes 20 times as long as all else of a summary."""
    with contextlib.suppress(ConfigError):
        return MappingProxyType(flatten(read_saved(path)))
    return MappingProxyType({})


def _stored(directory: Path) -> tuple[Mapping[str, int], float | None]:
    """Return (number of rollouts by status, start time) from the run's store."""
    try:
        with contextlib.closing(StoreListing(directory / STORE)) as store:
            return store.counts(), store.started_s()
    except UserError:  # missing, damaged or of a later release
        return {}, None


def _sources(directory: Path) -> Mapping[str, str]:
    try:
        digests = dict(json.loads((directory / SOURCES).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):  # missing or damaged
        return {}
    return {name: digest for name, digest in digests.items() if isinstance(digest, str)}


def _status(
    directory: Path, rows: Sequence[Row], settings: Mapping[str, Any], counts: Mapping[str, int]
) -> tuple[Status, str]:
    """Return the status of a run, and the reason if it failed."""
    if is_locked(directory):
        return "running", ""
    end, total = read_end(directory), _total_steps(settings)
    if end is not None:
        return end.status, f"{end.reason}: {end.detail}" if end.status == "failed" else ""
    if counts.get("running") or counts.get("queued"):
        return "failed", "its process was killed"
    # Releases before ended.json. The last evaluation has a row of its own.
    is_done = total is not None and any(row["step"] >= total - 1 for row in rows)
    return ("finished" if is_done else "stopped"), ""


def _total_steps(settings: Mapping[str, Any]) -> int | None:
    values = [settings.get(name, 0) for name in ("num_steps", "warmup.num_steps")]
    return sum(values) if settings and all(type(value) is int for value in values) else None


def _minutes(rows: Sequence[Row]) -> float:
    """Return the time of these steps. The last evaluation has a row without a step."""
    return sum(row.get("time/step_s", row.get("time/eval_s", 0.0)) for row in rows) / 60
