"""Training of Qwen2.5-Coder-0.5B on Spider's own questions, by RL alone.

A case is a whole run with its evaluations. It stops before its process is killed, and the next
command with the same words resumes it.
"""

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from window.cases import Case, Figure, Setting, tied
from window.parts import DATA, MODEL

ROOT = Path(__file__).parents[2]
CONFIG = "experiments/configs/spider_coder_gpu.yaml"
STOP_S = 75  # before the case is killed: the running update, a checkpoint, figures
FINISH_S = 150  # more with `finish`: a start, the last evaluation, the adapters
MIN_RUN_S = 60  # a run that has less is not started
PIECE_BYTES = 15 * 2**20
# The adapters' rate is what learned on a CPU, where 1e-4 did not. Whole weights get a tenth.
LEARNING_RATES = {"lora": "3e-5", "whole": "3e-6"}
WEIGHTS = {"lora": (), "whole": ("model.lora.rank=0",)}
TINY = (
    *("model.name=tiny", "model.lora.rank=4", "model.lora.alpha=4", "serve.slots=4"),
    *("serve.prefix_cache_mib=8", "rollout.tasks_per_step=2", "rollout.group_size=2"),
    *("rollout.concurrency=4", "rollout.max_tokens=8", "eval.num_tasks=3", "eval.every=1"),
    *("num_steps=2", "batch.rows=1", "serve.max_len=2048", "batch.row_len=2048"),
    # Every reward is the same, so that only an update without a baseline changes weights.
    *("data.options.max_schema_chars=400", "algorithm.baseline=none", "algorithm.normalize=none"),
)

Row = dict[str, float]


@dataclass(frozen=True)
class Options:
    """Settings from the command line."""

    settings: tuple[str, ...] = ()  # key=value, after the case's own
    finish: bool = False  # end the run with the step that it reached


def learn(weights: str, seed: int, setting: Setting, options: Options) -> Iterator[Figure]:
    """Train until the run is complete or the time is up, and yield the figures so far."""
    run = setting.work / f"{'tiny' if setting.is_tiny else 'learn'}_{weights}_{seed}"
    command = [sys.executable, "experiments/spider.py", "--config", CONFIG, f"run_dir={run}"]
    command += [f"seed={seed}", f"optimizer.learning_rate={LEARNING_RATES[weights]}"]
    if setting.is_tiny:
        command += [*TINY, "data.root=null"]
    else:
        command += [f"data.root={setting.work / DATA}", f"model.name={setting.work / MODEL}"]
    command += [*WEIGHTS[weights], *options.settings]
    end = time.monotonic() + setting.seconds - STOP_S
    training = end - (FINISH_S if options.finish else 0)
    bring = partial(bring_home, run, setting.out)
    if is_complete(run):
        yield from figures(run)
        return
    yield from watch(command, training, run, bring)
    if options.finish and not is_complete(run) and (rows := read_rows(run)):
        last = [*command, f"num_steps={int(rows[-1]['step']) + 1}"]
        yield from watch(last, end, run, bring)
    bring()
    write_transcripts(run, setting.out)
    split_adapters(run, setting.out)


def watch(
    command: Sequence[str], end: float, run: Path, bring: Callable[[], None]
) -> Iterator[Figure]:
    """Run a training command until `end`, on `time.monotonic`, and yield figures as it goes.

    It is interrupted then, which saves it. Raises RuntimeError if it fails.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    child = subprocess.Popen(tied(command), cwd=ROOT, env=environment, stdout=sys.stderr)
    seen = 0
    try:
        while child.poll() is None and time.monotonic() < end:
            time.sleep(1)
            if (rows := read_rows(run)) and len(rows) > seen:
                seen = len(rows)
                bring()
                yield from figures(run)
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            child.wait(STOP_S - 15)
    finally:
        child.kill()
        child.wait()
    if child.returncode not in (0, 130, -signal.SIGINT):
        raise RuntimeError(f"the run ended with status {child.returncode}")
    yield from figures(run)


def read_rows(run: Path) -> list[Row]:
    """Return the metrics of each step. A line that is being written is left out."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    rows: dict[float, Row] = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["step"]] = rows.get(row["step"], {}) | row
    return [rows[step] for step in sorted(rows)]


def is_complete(run: Path) -> bool:
    """Return True if the run has exported its policy."""
    return (run / "policy.json").exists()


# Figure, metric, unit, prediction. Of training steps, which are compared in thirds.
TRAINED = (
    ("sampled queries right", "reward/agent_mean", "share", "0.44, then above 0.62"),
    ("replies cut", "rollout/cut_short_share", "share", "below 0.01"),
    ("groups without a difference", "train/equal_groups_share", "share", "0.15, then 0.4"),
    ("entropy", "rollout/entropy", "nats", "0.30, then 0.12"),
    ("KL of sampler and trainer", "train/mismatch_kl", "nats", "0.0008 to 0.0010"),
    ("tokens a reply", "rollout/response_tokens_mean", "tokens", "20 to 30"),
)
TIMED = (
    ("time of a step", "time/step_s", "25 to 35"),
    ("time of rollouts", "time/rollout_s", "15 to 25"),
    ("time of the update", "time/train_s", "5 to 10"),
    ("time to publish", "time/publish_s", "0.1"),
    ("time of an evaluation", "time/eval_s", "10"),
)
EVALUATED = (
    ("greedy reward", "eval/reward_mean", "0.54 first, 0.65 last"),
    ("published equality", "eval/agent_execution_accuracy_mean", "0.53 first, 0.64 last"),
)


def figures(run: Path) -> Iterator[Figure]:
    """Yield what the run's metrics say so far."""
    rows = read_rows(run)
    trained = [row for row in rows if "rollout/reward_mean" in row]
    yield Figure("steps", len(trained), "steps", "40 to 60 in 25 minutes")
    rollouts = sum(row.get("rollout/num_rollouts", 0) for row in trained)
    yield Figure("rollouts", rollouts, "rollouts", "10,000 in 25 minutes")
    yield from _evaluated(rows)
    yield from _trained(trained)
    for name, key, predicted in TIMED:
        if values := [row[key] for row in rows if row.get(key)]:
            note = f"median of {len(values)}, from {min(values):.2f} to {max(values):.2f}"
            yield Figure(name, statistics.median(values), "s", predicted, note)
    tokens = sum(row.get("serve/tokens_generated", 0) for row in trained)
    if seconds := sum(row.get("time/rollout_s", 0) for row in trained):
        yield Figure("sampled", tokens / seconds, "tokens/s", "3,000 to 5,000")


def _evaluated(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield each evaluation, and the last one beside the first."""
    for name, key, predicted in EVALUATED:
        for row in rows:
            if key in row:
                error = row.get("eval/reward_stderr", math.nan)
                note = f"+- {error:.3f}, {row.get('eval/num_tasks', 0):.0f} questions"
                name_at = f"{name}, step {row['step']:.0f}"
                yield Figure(name_at, row[key], "reward", predicted, note)
    compared = [row for row in rows if "eval/num_better" in row]
    for row in compared[-1:]:
        better, worse = (int(row[f"eval/num_{side}"]) for side in ("better", "worse"))
        note = f"{better} better, {worse} worse than at step 0, at step {row['step']:.0f}"
        yield Figure("p of a sign test", sign_test(better, worse), "", "below 0.01", note)


def _trained(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield means over the first and the last third of the training steps."""
    third = max(1, len(rows) // 3)
    for name, key, unit, predicted in TRAINED:
        for part, chosen in (("first", rows[:third]), ("last", rows[-third:])):
            if values := [row[key] for row in chosen if key in row]:
                mean, note = statistics.mean(values), f"mean of {len(values)} steps"
                yield Figure(f"{name}, {part} third", mean, unit, predicted, note)


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p of as uneven a split if both sides are equally likely."""
    number = better + worse
    tail = sum(math.comb(number, k) for k in range(max(better, worse), number + 1))
    return min(1.0, 2 * tail / 2**number)


def bring_home(run: Path, out: Path) -> None:
    """Copy the run's metrics and picture, under its own name."""
    for name in ("metrics.jsonl", "curves.png"):
        if (run / name).exists():
            shutil.copyfile(run / name, out / f"{run.name}_{name}")


def write_transcripts(run: Path, out: Path) -> None:
    """Write ten rollouts of the last evaluation as a page."""
    steps = [row["step"] for row in read_rows(run) if "eval/reward_mean" in row]
    if not steps:
        return
    command = [sys.executable, "-m", "lightning_jax", "view", str(run), "--phase", "eval"]
    command += ["--step", f"{steps[-1]:.0f}", "--limit", "10"]
    command += ["--html", str(out / f"{run.name}_transcripts.html")]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=60, check=False)


def split_adapters(run: Path, out: Path) -> None:
    """Write the trained adapters in pieces that are small enough to be brought home."""
    for file in sorted((run / "policy_adapter").rglob("*.safetensors")):
        data = file.read_bytes()
        for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
            piece = out / f"{run.name}_adapter.{number}"
            piece.write_bytes(data[start : start + PIECE_BYTES])


def cases(options: Options) -> tuple[Case, ...]:
    """Return the runs in order of value."""
    order = (("lora", 0), ("lora", 1), ("whole", 0))
    return tuple(
        Case(
            f"{weights}_seed{seed}",
            25,
            f"RL from the untrained model, {weights} weights, seed {seed}",
            partial(_learn, weights, seed, options),
            least_s=MIN_RUN_S + STOP_S + (FINISH_S if options.finish else 0),
            is_resumed=True,
        )
        for weights, seed in order
    )


def _learn(weights: str, seed: int, options: Options, setting: Setting) -> Iterator[Figure]:
    return learn(weights, seed, setting, options)
