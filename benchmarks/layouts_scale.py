"""Simulate layouts from 8 to 1,024 chips, and draw what they bring.

    python benchmarks/layouts_scale.py [--chips 8 64 512] [--json FILE] [--plots docs/results]

Speeds and durations are those of benchmarks/layouts_rates.py. All layouts run the same rollouts.
Where samplers have chips of their own, the best of several splits is shown.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from layouts_rates import (
    CHIPS,
    PYTHON,
    WORKLOADS,
    Chip,
    disjoint,
    disjoint_in_one_process,
    lock_step,
    lock_step_in_one_process,
    shared,
)
from layouts_sim import Layout, Summary, Workload, simulate, summarize
from matplotlib.figure import Figure

ROLLOUTS = 1024  # a step
BATCHES = 12  # of rollouts that are counted, after those that begin at once
SPLITS = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # share of the chips that sample
AHEAD_TITLE = ", 64 H100, by rollout.ahead"
AHEADS = (0.25, 0.5, 1.0, 2.0, 4.0)  # rollout.ahead in batches
KINDS = (
    "lock step, one process serves",
    "lock step, all chips serve",
    "ahead, shared devices",
    "ahead, own devices, one process",
    "ahead, own devices and processes",
)
Make = Callable[[Chip, int, int, int], Layout]
Found = dict[str, dict[str, dict[str, Any]]]


def run(chip: Chip, work: Workload, layout: Layout) -> Summary:
    """Return the summary of a run without its beginning and its end.

    At the beginning as many rollouts start at once as may run. In the end none is left to start.
    """
    ends = -(-layout.ahead // work.tasks_per_step)
    first = 1 + 2 * ends
    steps = simulate(work, layout, chip.engine, PYTHON, num_steps=first + BATCHES + ends)
    return summarize(steps[: first + BATCHES], layout.num_engines, skip=first)


def splits(chip: Chip, chips: int) -> Iterable[int]:
    """Return numbers of chips that may sample, in whole engines."""
    rounded = {round(share * chips / chip.engine_chips) * chip.engine_chips for share in SPLITS}
    return sorted(n for n in rounded if 0 < n < chips)


def best(chip: Chip, chips: int, work: Workload, ahead: int, make: Make) -> tuple[str, Summary]:
    """Return the split with the most rollouts per second."""
    layouts = {make(chip, chips, ahead, number) for number in splits(chip, chips)}
    figures = {layout.name: run(chip, work, layout) for layout in layouts}
    return max(figures.items(), key=lambda item: item[1].rollouts_per_s)


def compare(chip: Chip, chips: int, work: Workload) -> dict[str, dict[str, Any]]:
    """Return a summary of each layout, by kind of layout."""
    ahead = work.tasks_per_step
    layouts = (
        lock_step_in_one_process(chip, chips),
        lock_step(chip, chips),
        shared(chip, chips, ahead),
    )
    fixed = dict(zip(KINDS, layouts, strict=False))
    rows = {name: (layout.name, run(chip, work, layout)) for name, layout in fixed.items()}
    if splits(chip, chips):
        for name, make in zip(KINDS[3:], (disjoint_in_one_process, disjoint), strict=True):
            rows[name] = best(chip, chips, work, ahead, make)
    base = rows[KINDS[1]][1].rollouts_per_s
    return {
        name: {"layout": layout, "speed_up": summary.rollouts_per_s / base, **vars(summary)}
        for name, (layout, summary) in rows.items()
    }


def by_ahead(chip: Chip, chips: int, work: Workload) -> dict[str, dict[str, Any]]:
    """Return the best split for each bound on how far samplers may be ahead."""
    base = run(chip, work, lock_step(chip, chips)).rollouts_per_s
    rows = {}
    for batches in AHEADS:
        ahead = round(batches * work.tasks_per_step)
        layout, summary = best(chip, chips, work, ahead, disjoint)
        speed_up = summary.rollouts_per_s / base
        rows[f"{batches:g}"] = {"layout": layout, "speed_up": speed_up, **vars(summary)}
    return rows


def show(title: str, rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        print(
            f"  {name:34s} {row['rollouts_per_s']:8.2f} rollouts/s {row['tokens_per_s']:9.0f} "
            f"tokens/s  x{row['speed_up']:.2f}  trainer waits {row['trainer_wait_share']:4.0%}, "
            f"sampler {row['sampler_wait_share']:4.0%}, busy {row['decode_busy_share']:4.0%}"
            f"  age {row['age_mean']:.2f}, at most {row['age_max']}  ({row['layout']})",
            flush=True,
        )


def draw_chips(figures: Found, path: Path) -> None:
    """Draw rollouts per second over chips, one panel for each workload and kind of chip."""
    titles = [title.removesuffix(" chips").split(", ") for title in figures if "by " not in title]
    panels = list(dict.fromkeys((work, chip) for work, chip, _ in titles))
    figure = Figure(figsize=(9, 3 * -(-len(panels) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat
    for (work, chip), ax in zip(panels, axes, strict=False):
        sizes = sorted(int(n) for w, c, n in titles if (w, c) == (work, chip))
        for index, name in enumerate(KINDS):
            points = [
                (n, rows[name]["rollouts_per_s"])
                for n in sizes
                if name in (rows := figures[f"{work}, {chip}, {n} chips"])
            ]
            ax.plot(*zip(*points, strict=True), marker="o", label=name, color=f"C{index}")
        ax.set(title=f"{work}, {chip}", xlabel="chips", ylabel="rollouts/s", yscale="log")
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, labels=[f"{n:,}" for n in sizes])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=80)


def draw_ahead(figures: Found, path: Path) -> None:
    """Draw the gain and the age of samples over the bound."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for title, rows in figures.items():
        if not title.endswith(AHEAD_TITLE):
            continue
        bounds, name = [float(bound) for bound in rows], title.split(",")[0]
        left.plot(bounds, [row["speed_up"] for row in rows.values()], marker="o", label=name)
        right.plot(bounds, [row["age_mean"] for row in rows.values()], marker="o", label=name)
    left.axhline(1, color="grey", linewidth=0.5)
    for ax, text in ((left, "rollouts/s over lock step"), (right, "mean age of a token, steps")):
        ax.set(xlabel="rollout.ahead over rollout.tasks_per_step", ylabel=text)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", type=int, nargs="*", default=[8, 64, 256, 1024])
    parser.add_argument("--kinds", nargs="*", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--json", type=Path, help="file of all figures; those in it are kept")
    parser.add_argument("--plots", type=Path, help="folder for the plots")
    args = parser.parse_args()
    figures: Found = {}
    if args.json and args.json.exists():
        figures = json.loads(args.json.read_text())

    def keep(title: str, make: Callable[[], dict[str, dict[str, Any]]]) -> None:
        if title not in figures:
            figures[title] = make()
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
        show(title, figures[title])

    for workload in args.workloads:
        work = WORKLOADS[workload](ROLLOUTS)
        for kind in args.kinds:
            for chips in args.chips:
                title = f"{workload}, {kind}, {chips} chips"
                keep(title, lambda c=CHIPS[kind], n=chips, w=work: compare(c, n, w))
        keep(f"{workload}{AHEAD_TITLE}", lambda w=work: by_ahead(CHIPS["H100"], 64, w))
    if args.plots:
        draw_chips(figures, args.plots / "layouts_chips.png")
        draw_ahead(figures, args.plots / "layouts_ahead.png")


if __name__ == "__main__":
    main()
