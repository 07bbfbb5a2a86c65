"""Plot of a run's metrics: first what a user asks, then the internals of the training.

`metric_descriptions.yaml` explains each metric.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from lightning_jax.system.files import replacing

DESCRIPTIONS = Path(__file__).with_name("metric_descriptions.yaml")
PLACEHOLDERS = {"NAME": r".+", "REASON": r"[a-z0-9_]+"}
Rows = Sequence[Mapping[str, float | int]]

COLUMNS = 4
MIN_SMOOTHED = 5  # points of a curve that gets a smoothed one
MAX_AGENT_PANELS = 8  # numbers that the agent returned
SAMPLED_PER_S = "sampled by the step's time"  # a curve that no metric has
BACKGROUND = "#f1f3f5"  # of the internals
WARMUP = "#e7ecf1"  # background of its steps


class Description(NamedTuple):
    """Unit and meaning of a metric."""

    unit: str
    text: str


@cache
def metric_descriptions() -> dict[str, Description]:
    """Return all descriptions. NAME and REASON in a metric stand for any name and reason."""
    texts = yaml.safe_load(DESCRIPTIONS.read_text())["metrics"]
    return {name: Description(*text.split(": ", 1)) for name, text in texts.items()}


def describe(name: str) -> Description | None:
    """Return the description of a metric in a row, or None if there is none.

    A metric of one agent, policy or task field, such as `eval/reward_mean/source=svamp`, has the
    description of the whole. A warm-up's `warmup/` metrics have those of `train/`.
    """
    area, _, rest = name.partition("/")
    area = "train" if area == "warmup" else area
    for whole in (name, f"{area}/{rest.split('/', 1)[0]}", f"{area}/{rest}"):
        keys = [whole, *(key for key, pattern in _patterns() if pattern.fullmatch(whole))]
        for key in keys:
            if description := metric_descriptions().get(key):
                return description
    return None


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Return the metrics with a placeholder as patterns, the longest first."""
    return [
        (key, re.compile(re.sub("|".join(PLACEHOLDERS), lambda word: PLACEHOLDERS[word[0]], key)))
        for key in sorted(metric_descriptions(), key=len, reverse=True)
        if any(word in key for word in PLACEHOLDERS)
    ]


class Panel(NamedTuple):
    """Curves with common axes. Without a text, the first metric's description explains them."""

    title: str
    metrics: tuple[str, ...]
    is_log: bool = False
    text: str = ""

    @property
    def explanation(self) -> str:
        description = describe(self.metrics[0])
        return self.text or (description.text if description else "")


RESULTS = (
    Panel(
        "reward",
        ("rollout/reward_mean", "eval/reward_mean"),
        text="training rollouts, and the dev tasks with their standard error",
    ),
    Panel(
        "share with full reward",
        ("rollout/full_reward_share", "eval/full_reward_share"),
        text="rollouts and dev tasks with a reward of 1 or more",
    ),
    Panel(
        "throughput (tokens/s)",
        (SAMPLED_PER_S, "train/tokens_per_s"),
        text="sampled by the whole step's time; trained by the update's",
    ),
)
INTERNALS = (
    Panel("supervised loss (nats/token)", ("warmup/loss",), text="warm-up on demonstrations"),
    Panel(
        "entropy (nats/token)",
        ("rollout/entropy", "train/entropy"),
        text="of all sampled tokens, and of those with a gradient",
    ),
    Panel("sampler-trainer KL (nats)", ("train/mismatch_kl",), is_log=True),
    Panel(
        "corrections cut, by length (share)",
        tuple(
            f"train/correction_truncated_share/length={name}"
            for name in ("short", "medium", "long")
        ),
        text="tokens of short, medium and long responses",
    ),
    Panel(
        "noise scale (groups)",
        ("train/noise_scale",),
        is_log=True,
        text="groups of which half of the squared gradient would be signal",
    ),
    Panel("gradient norm", ("train/grad_norm", "warmup/grad_norm"), is_log=True),
    Panel(
        "repeated and copied text (share)",
        ("audit/repetition_4", "audit/near_copies", "audit/distinct_3"),
        text="repeated 4-grams, near-copies in a group, different 3-grams",
    ),
    Panel("response length (tokens)", ("rollout/response_tokens_mean",)),
    Panel("calls per rollout", ("rollout/calls_mean",), text="calls to the policy: mean"),
    Panel(
        "seconds per step",
        ("time/rollout_s", "time/train_s", "time/eval_s"),
        text="parts of a step; some of them overlap",
    ),
)


def panels_of(rows: Rows) -> tuple[list[Panel], list[Panel]]:
    """Return the panels with points: what a user asks, and the internals."""
    names = {name for row in rows for name in row}
    reward, share, throughput = RESULTS
    results = [reward, share, *_component_panels(names), *_agent_panels(names), throughput]
    return (
        [panel for panel in results if _has_points(rows, panel)],
        [panel for panel in INTERNALS if _has_points(rows, panel)],
    )


def plot_curves(rows: Rows, path: Path, title: str) -> None:
    """Write a PNG atomically, with a panel for each group of metrics that has points."""
    rows = [_with_rate(row) for row in rows]
    results, internals = panels_of(rows)
    notes = ["thin: each step; bold: mean of neighboring steps"] * (len(rows) >= MIN_SMOOTHED)
    notes += ["shaded: warm-up"] * bool(warmup_steps(rows))
    heading = f"{title} ({'; '.join(notes)})" if notes else title
    sections = [(heading, results, "white")] * bool(results)
    sections += [("internals", internals, BACKGROUND)] * bool(internals)
    if not sections:
        return
    import matplotlib  # takes half a second, so import only when drawing
    from matplotlib.figure import Figure

    columns = [min(COLUMNS, len(panels)) for _, panels, _ in sections]
    lines = [-(-len(section[1]) // n) for section, n in zip(sections, columns, strict=True)]
    heights = [3.1 * number + 0.4 for number in lines]
    figure = Figure(figsize=(4.2 * max(*columns, 2), sum(heights)), layout="constrained")
    parts = figure.subfigures(len(sections), 1, height_ratios=heights, squeeze=False).flat
    for part, shape, section in zip(parts, zip(lines, columns, strict=True), sections, strict=True):
        heading, panels, background = section
        part.set_facecolor(background)
        part.suptitle(heading, fontsize=11, fontweight="bold")
        grid = part.subplots(*shape, squeeze=False).flat
        for axes, panel in zip(grid, panels, strict=False):
            _draw(axes, rows, panel)
        for axes in part.axes[len(panels) :]:
            axes.set_axis_off()
    with replacing(path) as draft, matplotlib.rc_context({"savefig.dpi": 90}):
        figure.savefig(draft, format="png")


def warmup_steps(rows: Rows) -> int:
    """Return the number of steps of the warm-up, 0 if there was none."""
    steps = [int(row["step"]) for row in rows if any(name.startswith("warmup/") for name in row)]
    return max(steps, default=-1) + 1


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbors, a quarter of the curve in all.

    At the ends there are fewer neighbors.
    """
    reach = max(len(values) // 8, 1)
    starts = [max(index - reach, 0) for index in range(len(values))]
    return [float(np.mean(values[start : index + reach + 1])) for index, start in enumerate(starts)]


def _component_panels(names: set[str]) -> list[Panel]:
    """Return a panel for each component of `rewards`, after one with all of them.

    There a held-out component that falls while the reward rises catches the eye.
    """
    parts = sorted(
        name.removeprefix("reward/").removesuffix("_mean")
        for name in names
        if name.startswith("reward/") and name.endswith("_mean")
    )
    panels = [Panel(f"reward {n}", (f"reward/{n}_mean", f"eval/reward_{n}_mean")) for n in parts]
    if len(parts) < 2:
        return panels
    names_of_all = ("rollout/reward_mean", *(f"reward/{name}_mean" for name in parts))
    text = "training rollouts: the reward that is trained, and each component"
    return [Panel("reward and components", names_of_all, text=text), *panels]


def _agent_panels(names: set[str]) -> list[Panel]:
    """Return a panel for each number that the agent returned, up to MAX_AGENT_PANELS."""
    numbers = sorted(
        {
            name.partition("/agent_")[2].removesuffix("_mean")
            for name in names
            if name.startswith(("rollout/agent_", "eval/agent_")) and name.endswith("_mean")
        }
    )
    left_out = len(numbers) - MAX_AGENT_PANELS
    panels = [
        Panel(
            f"agent's {number}",
            (f"rollout/agent_{number}_mean", f"eval/agent_{number}_mean"),
            text="a number that the agent returned: mean",
        )
        for number in numbers[:MAX_AGENT_PANELS]
    ]
    if left_out > 0:
        more = f"{panels[-1].text}; {left_out} more in metrics.jsonl"
        panels[-1] = panels[-1]._replace(text=more)
    return panels


def _has_points(rows: Rows, panel: Panel) -> bool:
    return any(_is_drawn(row, name, panel) for row in rows for name in panel.metrics)


def _is_drawn(row: Mapping[str, float | int], name: str, panel: Panel) -> bool:
    return name in row and (row[name] > 0 or not panel.is_log)


def _with_rate(row: Mapping[str, float | int]) -> dict[str, float | int]:
    """Return the row with the tokens that were sampled per second of the whole step."""
    sampled, seconds = row.get("serve/tokens_generated", 0), row.get("time/step_s", 0)
    return dict(row) | ({SAMPLED_PER_S: sampled / seconds} if sampled and seconds else {})


def _draw(axes: Any, rows: Rows, panel: Panel) -> None:
    """Draw the curves of a panel. A training curve is thin, and its smoothed one bold."""
    for number, name in enumerate(panel.metrics):
        points = [row for row in rows if _is_drawn(row, name, panel)]
        if not points:
            continue
        color = f"C{number}"
        steps, values = [row["step"] for row in points], [row[name] for row in points]
        if name.startswith("eval/"):
            stderr = name.replace("_mean", "_stderr")
            errors = [row.get(stderr, 0.0) for row in points] if stderr != name else None
            style = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.5}
            axes.errorbar(steps, values, yerr=errors, color=color, label=name, **style)
            continue
        is_smoothed = len(points) >= MIN_SMOOTHED
        strength = 0.35 if is_smoothed else 1.0
        label = None if is_smoothed else name
        axes.plot(steps, values, ".-", color=color, linewidth=0.8, alpha=strength, label=label)
        if is_smoothed:
            axes.plot(steps, smoothed(values), color=color, linewidth=2, label=name)
    if end := warmup_steps(rows):
        axes.axvspan(0, end, color=WARMUP, zorder=0)
    if panel.is_log:
        axes.set_yscale("log")
    axes.legend(fontsize=7)
    axes.set_title(panel.title, fontsize=10, fontweight="bold", loc="left", pad=16)
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "xytext": (0, 4)}
    axes.annotate(panel.explanation, (0, 1), fontsize=7.5, color="#555", **place)
    axes.set_xlabel("trainer step", fontsize=8)
    axes.tick_params(which="both", labelsize=7)  # within one decade all labels are minor
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
