"""Measure layouts of agents, engines and trainer: in lock step, ahead, in one process and more.

    python benchmarks/layouts.py [--layouts lock_step shared disjoint ray] [--seeds 3] [--dir DIR]
    python benchmarks/layouts.py --report DIR

Every run trains SmolLM2 on the sums task with benchmarks/layouts_agent.py, whose tools take a
log-normal time (settings in benchmarks/layouts.yaml). A layout is a few more settings. Runs go one
after another, seed by seed, each in a process of its own; finished ones are kept. The report comes
from their metrics alone. Rates leave out the first steps, which compile.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layouts_sim import Figures

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
import sweep

from lightning_jax.train.watch.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "benchmarks" / "layouts.yaml"
SKIP = 2  # steps that compile
WINDOW = 3  # steps over which rewards are averaged
AHEAD = (
    "rollout.ahead=4",  # one step's groups
    "algorithm.proximal=old",
    "algorithm.correction=truncate",
    "algorithm.correction_high=2",
    "algorithm.max_staleness=4",
)
ONE_DEVICE = ("mesh.fsdp=1",)
TWO_DEVICES = ("mesh.fsdp=1", "serve.mesh={data: 1, fsdp: 1, tensor: 1, first_device: 1}")
# A sampler and two workers are processes of their own, which Ray starts on this machine.
RAY = (
    "cluster.address=local",
    "cluster.samplers=1",
    "cluster.sampler_resources={CPU: 0.5}",
    "cluster.workers=2",
    "cluster.worker_resources={CPU: 0.25}",
)
Row = Mapping[str, float]


@dataclass(frozen=True)
class Kind:
    """Settings of a layout, and the number of simulated devices that it needs."""

    settings: tuple[str, ...]
    num_devices: int = 1


LAYOUTS = {
    "lock_step": Kind(ONE_DEVICE),
    "shared": Kind((*ONE_DEVICE, *AHEAD)),
    "disjoint": Kind((*TWO_DEVICES, *AHEAD), num_devices=2),
    "ray": Kind((*ONE_DEVICE, *AHEAD, *RAY)),
}


@dataclass(frozen=True)
class Measured(Figures):
    """Figures of one run, from its rows of training steps."""

    reward_at: tuple[tuple[float, float], ...]  # (seconds since the first row began, reward)
    final_reward: float  # greedy, after the last step


def measured(rows: Sequence[Row]) -> Measured:
    """Return the figures of a run. The last row is its evaluation."""
    steps = [row for row in rows if "time/step_s" in row]
    kept = steps[SKIP:]
    seconds = sum(row["time/step_s"] for row in kept)

    def share(name: str) -> float:
        return sum(row.get(name, 0.0) for row in kept) / seconds

    curve, passed = [], 0.0
    for index, row in enumerate(steps):
        passed += row["time/step_s"]
        window = steps[max(0, index - WINDOW + 1) : index + 1]
        curve.append((passed, statistics.fmean(row["rollout/reward_mean"] for row in window)))
    return Measured(
        step_s=seconds / len(kept),
        rollouts_per_s=sum(row["rollout/num_rollouts"] for row in kept) / seconds,
        tokens_per_s=sum(row["rollout/response_tokens"] for row in kept) / seconds,
        trainer_wait_share=share("time/trainer_wait_s"),
        sampler_wait_share=share("time/sampler_wait_s"),
        age_mean=statistics.fmean(row["train/staleness_mean"] for row in kept),
        age_max=max(row["train/staleness_max"] for row in kept),
        reward_at=tuple(curve),
        final_reward=rows[-1]["eval/reward_mean"],
    )


def reward_after(run: Measured, seconds: float) -> float:
    """Return the mean reward of the last steps that had ended by then, or of the first step."""
    ended = [reward for at, reward in run.reward_at if at <= seconds]
    return ended[-1] if ended else run.reward_at[0][1]


def command(layout: str, seed: int, directory: Path, more: Sequence[str]) -> list[str]:
    """Return the command line of a run."""
    settings = [*LAYOUTS[layout].settings, f"seed={seed}", f"run_dir={directory}", *more]
    return sweep.command("--config", str(CONFIG), *settings)


def run(layout: str, seed: int, directory: Path, more: Sequence[str]) -> None:
    """Train, unless the directory has a finished run."""
    devices = f"--xla_force_host_platform_device_count={LAYOUTS[layout].num_devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    sweep.train(
        [sweep.Training(directory, command(layout, seed, directory, more), {"XLA_FLAGS": flags})]
    )


def report(directory: Path) -> dict[str, list[Measured]]:
    """Print a table of all runs below the directory, and return their figures."""
    figures: dict[str, list[Measured]] = {}
    for layout in LAYOUTS:
        paths = sorted(directory.glob(f"{layout}-*/metrics.jsonl"))
        runs = [path for path in paths if sweep.has_finished(path.parent)]
        if runs:
            figures[layout] = [measured(read_metrics(path)) for path in runs]
    if not figures:
        sys.exit(f"{directory} has no finished run; run without --report first")
    fastest = min(run.reward_at[-1][0] for runs in figures.values() for run in runs)
    columns = [
        name for name in Measured.__dataclass_fields__ if not name.endswith(("_at", "_reward"))
    ]
    titles = [*columns, f"reward after {fastest:.0f} s", "reward after all", "seeds"]
    print(" | ".join(["layout", *titles]))
    for layout, runs in figures.items():
        cells = [
            sweep.mean_and_error([getattr(run, name) for run in runs], ".3g") for name in columns
        ]
        cells += [sweep.mean_and_error([reward_after(run, fastest) for run in runs], ".3g")]
        cells += [sweep.mean_and_error([run.final_reward for run in runs], ".3g"), str(len(runs))]
        print(" | ".join([layout, *cells]))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("runs/layouts"))
    parser.add_argument("--report", type=Path, help="only report the runs below this directory")
    parser.add_argument("--json", type=Path, help="where to write each run's figures")
    parser.add_argument("settings", nargs="*", help="further settings, such as num_steps=4")
    args = parser.parse_args()
    directory = args.report or args.dir
    if not args.report:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for layout in args.layouts:
                run(layout, seed, (directory / f"{layout}-{seed}").resolve(), args.settings)
    figures: dict[str, Any] = {
        name: [vars(r) for r in runs] for name, runs in report(directory).items()
    }
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
