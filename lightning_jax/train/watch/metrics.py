"""Metrics of the form `{"area/name": float}`: a JSON line per step, a plot, and metric sinks."""

import json
import logging
import math
import time
from pathlib import Path

from lightning_jax.system.files import write_whole
from lightning_jax.train.config import MetricsConfig
from lightning_jax.train.hook import Hook
from lightning_jax.train.sinks import Feeds, Status
from lightning_jax.train.watch.curves import plot_curves
from lightning_jax.train.watch.report import evaluations
from lightning_jax.types import Metrics

log = logging.getLogger(__name__)

Row = dict[str, float | int]  # metrics and the step
DRAW_EVERY_S = 30.0  # drawing takes a second


class MetricsLog(Hook):
    """Writer of `metrics.jsonl`, a JSON object per line with its `step`, and of `curves.png`.

    Rows also go to the sinks of `config`, with a table of the evaluations at the end, whose parts
    are those of the task field `by`. Opening the file for a run that resumes at `first_step`
    removes the lines of later steps, which will be logged again. The file never holds a step twice.
    """

    def __init__(
        self,
        path: Path,
        first_step: int,
        config: MetricsConfig | None = None,
        by: str | None = None,
    ) -> None:
        rows, num_damaged = read_rows(path)
        if num_damaged:
            log.warning(
                "%s had %d damaged lines, which are left out",
                *(path, num_damaged),
                extra={"event": "metrics_damaged", "number": num_damaged},
            )
        kept = [row for row in rows if row["step"] < first_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.path, self._by = path, by
        self.rows: list[Row] = kept
        self._drawn_at = -math.inf
        self.sinks = Feeds(config or MetricsConfig(), path.parent, first_step, kept)

    def after_step(self, step: int, row: Metrics) -> None:
        """Add a row, and redraw the curves if they are old."""
        metrics = {**row, **self.sinks.counts()}
        whole = {"step": step} | {name: float(value) for name, value in sorted(metrics.items())}
        with self.path.open("a") as file:
            file.write(json.dumps(whole) + "\n")
        self.rows.append(whole)
        self.sinks.write(whole)
        if time.monotonic() - self._drawn_at >= DRAW_EVERY_S:
            self.draw()

    def close(self, status: Status) -> None:
        """Plot the curves and end the sinks."""
        self.draw()
        self.sinks.close(evaluations(self.rows, self._by), status)

    def draw(self) -> None:
        """Plot the curves so far beside the file."""
        path = self.path.with_name("curves.png")
        try:
            plot_curves(self.rows, path, str(self.path.parent))
        except OSError as error:  # the rows are what counts, and an error may be on its way
            log.warning("cannot draw %s: %s", path, error, extra={"event": "curves_not_drawn"})
        self._drawn_at = time.monotonic()


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics file, or [] if it is missing. Damaged lines are left out."""
    return read_rows(path)[0]


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Return the rows of a metrics file, and the number of lines that are no rows.

    A last line cut by a crash is ignored. Raises OSError if the file cannot be read.
    """
    if not path.exists():
        return [], 0
    lines = path.read_bytes().splitlines(keepends=True)
    parsed = [_row(line) for line in lines if line.endswith(b"\n") and line.strip()]
    rows = [row for row in parsed if row is not None]
    return rows, len(parsed) - len(rows)


def _row(line: bytes) -> Row | None:
    """Return the row of a line, or None if it is no object of numbers with a step."""
    try:
        row = json.loads(line)
        is_row = isinstance(row, dict) and math.isfinite(row["step"])
        values = [float(value) for value in row.values()] if is_row else []
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    is_number = is_row and not any(isinstance(value, str) for value in row.values())
    return row if values and is_number else None
