"""Reports of a run: a line per step and, at its end, evaluations, findings and failures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_jax.engine.types import LONGEST_WAIT
from lightning_jax.rollouts.results.failures import failures
from lightning_jax.system.text import printable
from lightning_jax.traces.store import Store
from lightning_jax.train.directory import CHECKPOINTS
from lightning_jax.train.sinks import ResultTable
from lightning_jax.train.watch.findings import TROUBLESHOOTING, findings, unused_names
from lightning_jax.types import Metrics

EVALUATION = {  # columns of a table of evaluations, and their metrics
    "reward": "eval/reward_mean",
    "stderr": "eval/reward_stderr",
    "tasks": "eval/num_tasks",
    "change": "eval/change_mean",
    "change_stderr": "eval/change_stderr",
    "better": "eval/num_better",
    "worse": "eval/num_worse",
    "p": "eval/change_p",
    "sampled": "eval/sampled_reward_mean",
    "sampled_stderr": "eval/sampled_reward_stderr",
    "solved_by_any": "eval/sampled_solved_share",
}

SERVED = (  # counters of the server in a row
    *("requests", "steps", "tokens_generated", "prefix_breaks", "malformed_tool_calls"),
    *("joined_calls", "late_responses"),
)
SAMPLERS = ("serve/samplers", "serve/samplers_lost")  # counters of a cluster
NOTHING_TRAINED = "nothing was trained: no step with rollouts changed the weights"


def summary(row: Metrics) -> str:
    """Format the few metrics that a person watches, with the number of failed rollouts if any."""
    columns = {
        "eval": "eval/reward_mean",
        "reward": "rollout/reward_mean",
        "loss": "warmup/loss",
        "entropy": "rollout/entropy",
        "kl": "train/mismatch_kl",
    }
    failed = sum(
        row.get(f"{phase}/num_{whose}_failures", 0.0)
        for phase in ("eval", "rollout")
        for whose in ("agent", "infrastructure")
    )
    words = [f"{name} {row[key]:.3g}" for name, key in columns.items() if key in row]
    return " ".join(words + ([f"failed {failed:.0f}"] if failed else []))


def serve_metrics(before: Metrics, after: Metrics) -> Metrics:
    """Return the server's metrics between two readings of its counters."""
    did = {name: after[name] - before[name] for name in after if name in before}
    prompt = did["serve/prefill_tokens"] + did["serve/prefix_hit_tokens"]
    of_bandwidth: Metrics = {}
    if seconds := did.get("serve/decode_s"):  # of accelerators of known bandwidth
        of_bandwidth["serve/bandwidth_share"] = did["serve/decode_bound_s"] / seconds
    return of_bandwidth | {
        "serve/prefix_hit_share": did["serve/prefix_hit_tokens"] / max(prompt, 1.0),
        "serve/compiles": after["serve/compiles"],
        **{f"serve/{name}": did[f"serve/{name}"] for name in SERVED},
        **{name: after[name] for name in (*SAMPLERS, LONGEST_WAIT) if name in after},
    }


def result_table(rows: Sequence[Mapping[str, float | int]], by: str | None = None) -> str:
    """Return a table with a line per evaluation, and one below it per value of the task field `by`.

    Changes are per task, relative to the start of the phase (the warm-up or the steps after it). p
    is that of a sign test.
    """
    lines = ["step  greedy reward on dev tasks"]
    for row in rows:
        if "eval/reward_mean" in row:
            lines.append(f"{row['step']:4.0f}  {_result(row, '')}{_change(row)}")
            start = f"eval/reward_mean/{by}="
            lines += _sampled(row)
            values = [name.removeprefix(start) for name in row if name.startswith(start)]
            lines += [f"      {by}={value}: {_result(row, f'/{by}={value}')}" for value in values]
    return "\n".join([*lines, *_baselines(rows)])


def _baselines(rows: Sequence[Mapping[str, float | int]]) -> list[str]:
    """Return a line for the baselines of the last evaluation, and one for each part of it."""
    start = "eval/baseline_"
    evaluated = [row for row in rows if "eval/reward_mean" in row][-1:]
    parts: dict[str, list[str]] = {}
    for name, value in (item for row in evaluated for item in row.items()):
        if name.startswith(start):
            baseline, _, part = name.removeprefix(start).partition("/")
            parts.setdefault(part, []).append(f"{baseline} {value:.3f}")
    return [
        (f"      {part}: " if part else "without a model: ") + ", ".join(parts[part])
        for part in sorted(parts)
    ]


def evaluations(rows: Sequence[Mapping[str, float | int]], by: str | None = None) -> ResultTable:
    """Return `result_table` with its numbers. The parts of an evaluation follow the whole."""
    table = []
    for row in rows:
        if "eval/reward_mean" in row:
            parts = [name.removeprefix("eval/reward_mean") for name in row]
            parts = [part for part in parts if part.startswith(f"/{by}=")]
            for part in ("", *parts):
                values = [row.get(f"{metric}{part}") for metric in EVALUATION.values()]
                table.append((row["step"], part.removeprefix("/") or "all", *values))
    return ResultTable(("step", "part", *EVALUATION), tuple(table), result_table(rows, by))


def learning_table(rows: Sequence[Mapping[str, float | int]]) -> str:
    """Return why steps taught little, with a line per reason, or "" if none did.

    Say so if no step with rollouts changed the weights.
    """
    steps = _with_rollouts(rows)
    all_findings = [finding for row in steps for finding in findings(row)]
    lines = []
    if is_untrained(rows):
        lines.append(NOTHING_TRAINED)
    for kind, number in Counter(finding.kind for finding in all_findings).items():
        largest = max(
            (f for f in all_findings if f.kind == kind), key=lambda finding: finding.share
        )
        lines.append(f"in {number} of {len(steps)} steps {largest.sentence}")
    for kind, name in unused_names(steps):
        lines.append(f"{kind} {name} matched nothing in any step; correct it or remove it")
    return "\n".join([*lines, TROUBLESHOOTING] if lines else [])


def is_untrained(rows: Sequence[Mapping[str, float | int]]) -> bool:
    """Return True if the run has steps with rollouts and none changed the weights."""
    steps = _with_rollouts(rows)
    return bool(steps) and not any(_num_updates(row) for row in steps)


def _with_rollouts(
    rows: Sequence[Mapping[str, float | int]],
) -> list[Mapping[str, float | int]]:
    return [row for row in rows if "rollout/num_rollouts" in row]


def _num_updates(row: Mapping[str, float | int]) -> float:
    """Return the number of updates that changed any policy's weights.

    A step without sequences has one skipped update and none that was made.
    """
    updates, skipped = "train/num_updates", "train/skipped_updates"
    policies = [name.removeprefix(updates) for name in row if name.startswith(updates)]
    return sum((max(row[updates + p] - row.get(skipped + p, 0.0), 0.0) for p in policies), 0.0)


def checkpoint_line(directory: Path, keep: int, label: Path | None = None) -> str:
    """Return how much space the checkpoints of a run directory take, and how to need less.

    `label` is the run directory as the user wrote it.
    """
    folder = (label or directory) / CHECKPOINTS
    files = (directory / CHECKPOINTS).rglob("*")
    size = sum(path.stat().st_size for path in files if path.is_file())
    fewer = ", or lower checkpoint.keep" if keep > 1 else ""
    return (
        f"checkpoints: {size / 1e9:.1f} GB in {folder} (checkpoint.keep={keep}); delete them if "
        f"you will not continue or verify this run{fewer}"
    )


def failure_table(store: Store) -> str:
    """Return how a run's rollouts and calls ended, with a line per failure reason."""
    rollouts, failed_calls = store.rollouts(), store.failed_calls()
    counts = Counter(rollout.status for rollout in rollouts)
    stopped = counts["stopped"] or ""
    num_failed = sum(number for _, number, _ in failed_calls)
    counted = [
        (
            failure.status.removesuffix("_failure"),
            failure.count,
            failure.reason,
            failure.example,
            failure.detail,
        )
        for failure in failures(rollouts)
    ]
    counted += [("call", number, reason, example, "") for reason, number, example in failed_calls]
    lines = [
        f"rollouts: {counts['scored']} scored, {counts['agent_failure']} failed by the agent, "
        f"{counts['infrastructure_failure']} by the infrastructure"
        f"{stopped and f', {stopped} stopped'}; "
        f"calls: {store.num_calls() - num_failed} answered, {num_failed} failed"
    ]
    for what, number, reason, example, detail in counted:
        such_as = f", such as in {example}" if example else ""
        line = f"  {what}: {number} {reason}{such_as}" + (f": {detail}" if detail else "")
        lines.append(" ".join(printable(line).splitlines()))
    return "\n".join(lines)


def _change(row: Mapping[str, float | int], area: str = "eval/") -> str:
    if f"{area}change_mean" not in row:
        return ""
    p = f", p = {row[f'{area}change_p']:.2g}" if f"{area}change_p" in row else ""
    return (
        f"   {row[f'{area}change_mean']:+.3f} ± {row[f'{area}change_stderr']:.3f} since step "
        f"{row['eval/change_since_step']:.0f}: {row[f'{area}num_better']:.0f} better, "
        f"{row[f'{area}num_worse']:.0f} worse{p}"
    )


def _sampled(row: Mapping[str, float | int]) -> list[str]:
    """Return lines of the sampled attempts of an evaluation, if it has any."""
    if "eval/sampled_reward_mean" not in row:
        return []
    mean, error = row["eval/sampled_reward_mean"], row["eval/sampled_reward_stderr"]
    solved, unequal = row["eval/sampled_solved_share"], row["eval/sampled_unequal_share"]
    return [
        f"      sampled {mean:.3f} ± {error:.3f}{_change(row, 'eval/sampled_')}",
        f"      of {row['eval/sampled_attempts']:.0f} attempts one solves {solved:.1%} of the "
        f"tasks, and {unequal:.1%} have attempts that differ",
    ]


def _result(row: Mapping[str, float | int], part: str) -> str:
    mean, error = row[f"eval/reward_mean{part}"], row[f"eval/reward_stderr{part}"]
    return f"{mean:.3f} ± {error:.3f} (n={row[f'eval/num_tasks{part}']:.0f})"
