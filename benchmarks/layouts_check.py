"""Compare measured layouts with what the simulation says of them.

    python benchmarks/layouts_check.py --dir runs/layouts --steps 1:0.028 4:0.041 16:0.075

The simulation gets the speeds of the machine, and from the runs in lock step the duration of an
update and the lengths of calls. Nothing of the other layouts is fitted. `--steps` are decode steps
in seconds by number of slots, from `python benchmarks/speed.py --slots N`.

All layouts of one machine share its cores, so decoding has half of them during an update.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from layouts import LAYOUTS, SKIP, Measured, Row, measured
from layouts_agent import waits
from layouts_rates import OLD_POLICY
from layouts_sim import (
    EngineRates,
    Layout,
    PythonCosts,
    Summary,
    Turn,
    Workload,
    simulate,
    summarize,
)

from lightning_jax.settings import load_config
from lightning_jax.train.config import Config
from lightning_jax.train.directory import METRICS, SETTINGS
from lightning_jax.train.watch.metrics import read_metrics

PYTHON = PythonCosts(agent_s=2e-3, gateway_s=2.2e-3)  # issue 35, and the openai client
CPU_SHARE = 0.5


def engine_rates(steps_s: dict[int, float], slots: int, prefill_tokens_per_s: float) -> EngineRates:
    """Return the straight line closest to the measured decode steps."""
    per_request, step_s = np.polyfit(list(steps_s), list(steps_s.values()), 1)
    return EngineRates(slots, float(step_s), float(per_request), prefill_tokens_per_s)


def workload(config: Config, rows: Sequence[Row], added_tokens: float) -> Workload:
    """Return the rollouts of a run: tools as its agent draws them, calls of the mean length."""
    calls = statistics.fmean(row["rollout/calls_mean"] for row in rows)
    response = statistics.fmean(row["rollout/response_tokens_mean"] for row in rows)
    options = config.agent.options

    def turns(rng: np.random.Generator) -> list[Turn]:
        tools = waits(str(rng.integers(1 << 60)), **options)
        number = 1 + (rng.random() < calls - 1)
        first = Turn(0.0, 0.0, next(tools))  # the tool before the first call
        return [first, *(Turn(added_tokens, response, next(tools)) for _ in range(number))]

    rollout = config.rollout
    return Workload(rollout.tasks_per_step, rollout.group_size, turns, rollout.concurrency)


def layout(name: str, config: Config, update_s: float) -> Layout:
    """Return a layout of one machine whose updates take `update_s` in lock step."""
    ahead = config.rollout.ahead
    return Layout(
        name,
        num_engines=1,
        train_tokens_per_s=float("inf"),
        train_fixed_s=update_s * (OLD_POLICY if config.algorithm.proximal == "old" else 1.0),
        ahead=ahead,
        max_staleness=config.algorithm.max_staleness,
        decode_share=CPU_SHARE if ahead else None,
        num_workers=config.cluster.workers,
    )


def update_s(rows: Sequence[Row]) -> float:
    """Return the mean time of a step without its rollouts."""
    return statistics.fmean(row["time/step_s"] - row["time/trainer_wait_s"] for row in rows)


def training_rows(directory: Path) -> Sequence[Row]:
    """Return the rows of a run's training steps, without those that compile."""
    rows = read_metrics(directory / METRICS)
    return [row for row in rows if "time/step_s" in row][SKIP:]


def show(name: str, kind: str, figures: Measured | Summary) -> None:
    names = ("step_s", "rollouts_per_s", "trainer_wait_share", "sampler_wait_share", "age_mean")
    cells = [f"{getattr(figures, name):8.2f}" for name in names]
    print(f"{name:10s} {kind:10s} " + " ".join(cells) + f" {figures.age_max:4.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="folder of benchmarks/layouts.py")
    parser.add_argument("--steps", nargs="+", required=True, metavar="SLOTS:SECONDS")
    parser.add_argument("--prefill", type=float, default=500.0, help="tokens per second")
    parser.add_argument("--added-tokens", type=float, default=10.0, help="to prefill, per call")
    args = parser.parse_args()
    runs = {name: sorted(args.dir.glob(f"{name}-*")) for name in LAYOUTS}
    runs = {name: [run for run in paths if run.is_dir()] for name, paths in runs.items()}
    lock_step = [row for run in runs["lock_step"] for row in training_rows(run)]
    pairs = (pair.split(":") for pair in args.steps)
    steps_s = {int(slots): float(seconds) for slots, seconds in pairs}
    print("layout     kind         step_s  rolls/s  trainer  sampler      age  max")
    for name, directories in runs.items():
        if not directories:
            continue
        config = load_config(Config, [str(directories[0] / SETTINGS)])
        rates = engine_rates(steps_s, config.serve.slots, args.prefill)
        work = workload(config, lock_step, args.added_tokens)
        simulated = simulate(
            work,
            layout(name, config, update_s(lock_step)),
            rates,
            PYTHON,
            num_steps=config.num_steps * len(directories) * 4,
        )
        for directory in directories:
            show(name, "measured", measured(read_metrics(directory / METRICS)))
        show(name, "simulated", summarize(simulated[:-2], 1, skip=SKIP))


if __name__ == "__main__":
    main()
