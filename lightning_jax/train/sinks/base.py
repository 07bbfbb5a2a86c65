"""Interface of a metric sink, and what it is told of the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_jax.train.directory import Status

Row = Mapping[str, float | int]  # metrics and the step


@dataclass(frozen=True)
class RunIdentity:
    """Name, settings and place of a run."""

    id: str  # stays the same when the run resumes
    name: str
    project: str
    directory: Path
    settings: Mapping[str, Any]  # by dotted key, without secrets
    first_step: int  # rows of this step and later ones will be written
    is_known: bool  # True if the sink already has earlier rows of the run


@dataclass(frozen=True)
class ResultTable:
    """Evaluations of a run, with a row for each, and the same as text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[float | int | str | None, ...], ...]
    text: str


@runtime_checkable
class Sink(Protocol):
    """Place that keeps the metrics of one run.

    It is opened, written and closed on one thread of its own, so any call may take long.
    """

    def write(self, row: Row) -> None:
        """Add the metrics of one step."""
        ...

    def close(self, results: ResultTable, status: Status) -> None:
        """Add the results of a run that has ended, and wait until everything is kept."""
        ...
