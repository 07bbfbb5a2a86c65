"""Metric sink of tests."""

from collections.abc import Callable

from lightning_jax.train.sinks import ResultTable, Status
from lightning_jax.train.sinks.base import Row, RunIdentity


class ListSink:
    """Sink that keeps its rows in a list, after `before_write`."""

    def __init__(
        self, run: RunIdentity, before_write: Callable[[Row], object] = lambda row: None
    ) -> None:
        self.run, self.before_write = run, before_write
        self.rows: list[Row] = []
        self.end: tuple[ResultTable, Status] | None = None

    def write(self, row: Row) -> None:
        self.before_write(row)
        self.rows.append(row)

    def close(self, results: ResultTable, status: Status) -> None:
        self.end = results, status
