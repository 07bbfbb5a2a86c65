"""Metrics of the form `{"area/name": float}`: a JSON line per step, a plot, and metric sinks."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from lightning_jax.system.files import write_whole
from lightning_jax.train.config import MetricsConfig
from lightning_jax.train.curves import plot_curves
from lightning_jax.train.report import evaluations
from lightning_jax.train.sinks import Feeds, Status

Row = dict[str, float | int]  # metrics and the step
DRAW_EVERY_S = 30.0  # drawing takes a second


class MetricsLog:
    """Writer of `metrics.jsonl`, a JSON object per line with its `step`, and of `curves.png`.

    Rows also go to the sinks of `config`. Opening the file for a run that resumes at `first_step`
    removes the lines of later steps, which will be logged again. The file never holds a step twice.
    """

    def __init__(self, path: Path, first_step: int, config: MetricsConfig | None = None) -> None:
        kept = [row for row in read_metrics(path) if row["step"] < first_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.path = path
        self.rows: list[Row] = kept
        self._drawn_at = -math.inf
        self.sinks = Feeds(config or MetricsConfig(), path.parent, first_step, kept)

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Add a row, and redraw the curves if they are old."""
        metrics = {**metrics, **self.sinks.counts()}
        row = {"step": step} | {name: float(value) for name, value in sorted(metrics.items())}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self.sinks.write(row)
        if time.monotonic() - self._drawn_at >= DRAW_EVERY_S:
            self.draw()

    def close(self, status: Status, by: str | None = None) -> None:
        """Plot the curves and end the sinks. `by` is the task field of the evaluations' parts."""
        self.draw()
        self.sinks.close(evaluations(self.rows, by), status)

    def draw(self) -> None:
        """Plot the curves so far beside the file."""
        plot_curves(self.rows, self.path.with_name("curves.png"), str(self.path.parent))
        self._drawn_at = time.monotonic()


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics file, or [] if it is missing.

    A last line cut by a crash is ignored.
    """
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
