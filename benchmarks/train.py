"""Measure the speed and memory of a trainer's update, next to other trainers in the same run.

    python benchmarks/train.py [--only a b] [--peers torch trl] [--steps N] [--rounds N]
    python benchmarks/train.py --loop RUN_DIR

Each trainer runs in a separate process, one after another, so that each peak of memory is its own.
All get the same calls, 2 threads, and the same weights from a Hugging Face directory (written once
to `.cache/`). They use float32 unless the name says otherwise; ours then has bfloat16 weights and
float32 activations. updates.py defines the calls, and the scripts in `peers/` define each trainer's
settings. Peers share an environment, made once in `peers/.venvs/`. With `--rounds 3` each trainer
has three turns, so that a change in the machine's speed favors none. With `--shrink 8` all lengths
are an eighth, for a quick trial of the command.

In the table, `seconds` is the median of the updates after each turn's first, and `ratio` a peer's
divided by ours. `tokens/s` counts the tokens of the calls one by one and without padding.
`computed` counts the tokens that went through the model. `first s` is the first update less the
median (ours compiles in it). `x MiB` is a peer's peak memory divided by ours. `norm` is the norm of
the first gradient: the same work gives the same norm.

`--loop` reads `metrics.jsonl` of a run and prints the share of each part of a step. The first step
of the policy phase compiles, so it does not count.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from serve import HERE, PeerError, as_words, events, hf_directory, print_line, print_machine
from updates import WORKLOADS, Result, num_tokens

from lightning_jax.testing.machine import environment
from lightning_jax.train.watch.metrics import Row, read_metrics

COLUMNS = ("seconds", "ratio", "tokens/s", "computed", "cpu s", "first s", "MiB", "x MiB", "norm")
OURS, OURS_BF16 = "lightning_jax", "lightning_jax bf16"


@dataclass(frozen=True)
class Trainer:
    """Trainer to measure: a script and its arguments besides the workload."""

    name: str
    peer: str | None  # name of the peer's script; None: ours
    arguments: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ("a", "b")


TRAINERS = (
    Trainer(OURS, None),
    Trainer(OURS_BF16, None, ("--dtype", "bfloat16")),
    Trainer("torch", "torch", (), ("a",)),  # b takes minutes and has no target for it
    Trainer("torch all logits", "torch", ("--logits", "all"), ("a",)),
    Trainer("torch bf16 autocast", "torch", ("--dtype", "bfloat16"), ("a",)),
    Trainer("trl", "trl"),
)
# (workload, peer, column, smallest ratio of the peer's value to ours)
TARGETS = (
    ("a", "torch", "seconds", 1.5),
    ("a", "torch bf16 autocast", "seconds", 1.0),
    ("a", "trl", "seconds", 2.5),
    ("b", "trl", "seconds", 6.0),
    ("b", "trl", "peak_mib", 2.0),
)
NAIVE_TO_FOREST = 4.0  # lower limit in workload b

# Parts of a step: metrics to add, metrics to subtract, the largest share it should have.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], float | None]] = {
    "rollout": (("time/rollout_s",), (), None),
    "critic's values": (("time/values_s",), (), None),
    "credit, batching": (("time/prepare_s", "time/batching_s"), (), 0.02),
    "update": (("time/train_s",), ("time/batching_s",), None),
    "weight publish": (("time/publish_s",), (), 0.01),
    "checkpoint": (("time/checkpoint_wait_s",), (), None),
    "evaluation": (("time/eval_s",), (), None),
}


def median_s(result: Result) -> float:
    return statistics.median(result.seconds[1:])


def merged(before: Result | None, result: Result) -> Result:
    """Merge two turns of a trainer: all updates but the second turn's first, the higher peak."""
    if before is None:
        return result
    return replace(
        result,
        seconds=before.seconds + result.seconds[1:],
        cpu_s=before.cpu_s + result.cpu_s[1:],
        peak_mib=max(before.peak_mib or 0.0, result.peak_mib or 0.0) or None,
    )


def measure(trainer: Trainer, workload: str, args: argparse.Namespace, python: Path) -> Result:
    """Measure one trainer on one workload in a separate process. Raises PeerError."""
    script = HERE / (f"peers/run_{trainer.peer}.py" if trainer.peer else "train_ours.py")
    shared = ["--workload", workload, "--steps", str(args.steps), "--shrink", str(args.shrink)]
    result = None
    for event in events(
        f"train {trainer.name} {workload}",
        [python, script, hf_directory(args.model), *shared, *trainer.arguments],
    ):
        if "versions" in event:
            print_line(f"{trainer.name}: {as_words(event['versions'])}")
        else:
            result = Result(**{**event, "seconds": tuple(event["seconds"])})
    if result is None:
        raise PeerError(f"{trainer.name} {workload} printed no result.")
    return result


def head() -> str:
    return f"{'':2} {'trainer':20}" + "".join(f"{name:>10}" for name in COLUMNS)


def as_line(workload: str, name: str, result: Result, ours: Result | None, tokens: int) -> str:
    """Format one line of the table. `ours` is our result for the same workload, or None."""
    seconds, ratio, more = median_s(result), "-", "-"
    if ours is not None:
        ratio = f"{seconds / median_s(ours):.2f}"
        more = f"{(result.peak_mib or 0.0) / (ours.peak_mib or 1.0):.2f}"
    cells = [
        f"{seconds:.2f}",
        ratio,
        f"{tokens / seconds:.1f}",
        f"{result.computed}",
        f"{statistics.median(result.cpu_s[1:]):.1f}",
        f"{result.seconds[0] - seconds:.1f}",
        f"{result.peak_mib or 0.0:.0f}",
        more,
        f"{result.grad_norm:.4g}",
    ]
    return f"{workload:2} {name:20}" + "".join(f"{cell:>10}" for cell in cells)


def print_targets(results: dict[tuple[str, str], Result]) -> None:
    """Print each target as met or missed, as far as it was measured."""
    for workload, peer, column, target in TARGETS:
        for name in (OURS, OURS_BF16):
            ours, theirs = results.get((workload, name)), results.get((workload, peer))
            if ours is None or theirs is None:
                continue
            both = (
                (median_s(theirs), median_s(ours))
                if column == "seconds"
                else (theirs.peak_mib or 0.0, ours.peak_mib or 1.0)
            )
            ratio, what = both[0] / both[1], {"seconds": "time", "peak_mib": "peak memory"}[column]
            print_line(
                f"{workload}: {peer} takes {ratio:.2f} times the {what} of {name}; "
                f"target {target:g}: {verdict(ratio >= target)}"
            )
    for (workload, name), result in results.items():
        if result.naive_to_forest is not None and workload == "b":
            print_line(
                f"{workload}: tokens_naive / tokens_forest is {result.naive_to_forest:.2f}; target "
                f"{NAIVE_TO_FOREST:g}: {verdict(result.naive_to_forest >= NAIVE_TO_FOREST)}"
            )
        if result.limit_s is not None and result.gflops is not None:
            print_line(
                f"{workload}: {name}'s products alone take {result.limit_s:.2f} s at "
                f"{result.gflops:.0f} GFLOP/s, {result.limit_s / median_s(result):.0%} of its time"
            )


def verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def print_norms(results: dict[tuple[str, str], Result]) -> None:
    """Report trainers that did different work from ours, by the norm of the first gradient."""
    for (workload, name), result in results.items():
        ours = results.get((workload, OURS))
        tolerance = 0.1 if "bf16" in name else 0.01
        if ours and abs(result.grad_norm / ours.grad_norm - 1.0) > tolerance:
            print_line(
                f"{workload}: {name} has a gradient of norm {result.grad_norm:.4g} where ours has "
                f"{ours.grad_norm:.4g}: it did not do the same work"
            )


def compare(args: argparse.Namespace) -> int:
    """Print every line as soon as it is measured, then the targets.

    Return the number of failed runs.
    """
    # Install, write and fetch everything before the first measurement.
    python = Path(sys.executable)
    peers = python
    if args.peers:
        peers = environment(HERE / "peers/requirements-trl.txt", HERE / "peers/.venvs")
    hf_directory(args.model)
    os.environ["HF_HUB_OFFLINE"] = "1"
    print_machine()
    print_line(head())
    results: dict[tuple[str, str], Result] = {}
    failed = 0
    for workload in args.only:
        tokens = num_tokens(WORKLOADS[workload](args.shrink))
        trainers = [
            trainer
            for trainer in TRAINERS
            if workload in trainer.workloads and trainer.peer in (None, *args.peers)
        ]
        for trainer in trainers * args.rounds:
            try:
                result = measure(trainer, workload, args, peers if trainer.peer else python)
            except PeerError as error:
                failed += 1
                print_line(str(error))
                continue
            key = (workload, trainer.name)
            results[key] = merged(results.get(key), result)
            ours = results.get((workload, OURS))
            print_line(as_line(workload, trainer.name, results[key], ours, tokens))
    print_line(f"load {os.getloadavg()[0]:.2f}")
    print_targets(results)
    print_norms(results)
    return failed


def shares(rows: Sequence[Row]) -> list[str]:
    """Return lines with each part's share of the step time. Raises ValueError without a step."""
    steps = [row for row in rows if "time/rollout_s" in row and "time/step_s" in row][1:]
    if not steps:
        raise ValueError(
            f"{len(rows)} rows hold no second step with time/rollout_s and time/step_s; expected "
            "metrics of a run of at least 2 steps made by this version."
        )
    total = sum(row["time/step_s"] for row in steps)
    lines, left = [f"{len(steps)} steps, {total / len(steps):.1f} s each"], total
    for name, (added, subtracted, most) in PARTS.items():
        seconds = sum(row.get(key, 0.0) for row in steps for key in added)
        seconds -= sum(row.get(key, 0.0) for row in steps for key in subtracted)
        left -= seconds
        aim = "" if most is None else f"  aim below {most:.0%}: {verdict(seconds < most * total)}"
        lines.append(f"{name:18}{seconds / len(steps):9.3f} s{seconds / total:8.2%}{aim}")
    return [*lines, f"{'rest':18}{left / len(steps):9.3f} s{left / total:8.2%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare trainers on the calls of agents.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="*", choices=("torch", "trl"), default=[])
    parser.add_argument("--steps", type=int, default=3, help="updates after the first")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each trainer")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this")
    parser.add_argument("--loop", type=Path, metavar="RUN_DIR", help="a run to read instead")
    args = parser.parse_args()
    if min(args.steps, args.rounds, args.shrink) < 1:
        parser.error("--steps, --rounds and --shrink are numbers of 1 or more.")
    if args.loop:
        try:
            print_line("\n".join(shares(read_metrics(args.loop / "metrics.jsonl"))))
        except ValueError as error:
            parser.error(str(error))
    elif compare(args):
        sys.exit(1)


if __name__ == "__main__":
    main()
