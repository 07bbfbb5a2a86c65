"""Metrics of the form `{"area/name": float}`: a JSON line per step, and a plot of the curves."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_jax.system.files import replacing, write_whole

Row = dict[str, float | int]  # metrics and the step
DRAW_EVERY_S = 30.0  # drawing takes a second

# Panels of the plot: title, metrics, logarithmic axis.
PANELS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("reward", ("rollout/reward_mean", "eval/reward_mean"), False),
    ("supervised loss (nats/token)", ("warmup/loss",), False),
    ("entropy (nats/token)", ("train/entropy",), False),
    ("sampler-trainer KL (nats)", ("train/mismatch_kl",), True),
    ("gradient norm", ("train/grad_norm", "warmup/grad_norm"), True),
    ("response length (tokens)", ("rollout/response_tokens_mean",), False),
    ("calls per rollout", ("rollout/calls_mean",), False),
    ("seconds per step", ("time/rollout_s", "time/train_s", "time/eval_s"), False),
)


class MetricsLog:
    """Writer of `metrics.jsonl`, a JSON object per line with its `step`, and of `curves.png`.

    Opening the file for a run that resumes at `first_step` removes the lines of later steps, which
    will be logged again. The file never holds a step twice.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] < first_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.path = path
        self.rows: list[Row] = kept
        self._drawn_at = -math.inf

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Add a row, and redraw the curves if they are old."""
        row = {"step": step} | {name: float(value) for name, value in sorted(metrics.items())}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        if time.monotonic() - self._drawn_at >= DRAW_EVERY_S:
            self.draw()

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


def plot_curves(rows: Sequence[Mapping[str, float | int]], path: Path, title: str) -> None:
    """Write a PNG atomically, with one panel for each of PANELS that has points."""
    panels = [panel for panel in PANELS if any(name in row for row in rows for name in panel[1])]
    if not panels:
        return
    import matplotlib  # takes half a second, so import only when drawing
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.0 * lines), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, (name, metrics, log_scale) in zip(
        figure.subplots(lines, columns, squeeze=False).flat, panels, strict=False
    ):
        _draw(axes, rows, metrics, log_scale)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("trainer step", fontsize=8)
        axes.tick_params(which="both", labelsize=7)  # within one decade all labels are minor
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    with replacing(path) as draft, matplotlib.rc_context({"savefig.dpi": 90}):
        figure.savefig(draft, format="png")


def _draw(
    axes: Any, rows: Sequence[Mapping[str, float | int]], metrics: Sequence[str], log_scale: bool
) -> None:
    for name in metrics:
        points = [(row["step"], row[name], row) for row in rows if name in row]
        if log_scale:
            points = [point for point in points if point[1] > 0]
        if not points:
            continue
        steps, values, found = zip(*points, strict=True)
        errors = [row.get(name.replace("_mean", "_stderr"), 0.0) for row in found]
        if name.startswith("eval/"):
            axes.errorbar(
                steps, values, yerr=errors, marker="o", capsize=3, linewidth=1, label=name
            )
        else:
            axes.plot(steps, values, marker=".", linewidth=1, label=name)
    if log_scale and any(name in row and row[name] > 0 for row in rows for name in metrics):
        axes.set_yscale("log")
    if axes.has_data():
        axes.legend(fontsize=7)
