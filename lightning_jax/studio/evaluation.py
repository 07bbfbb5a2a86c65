"""Tables of an evaluation and of a comparison of two. Pure functions."""

from collections.abc import Mapping, Sequence

from lightning_jax.rollouts.results.compare_tasks import TaskComparison
from lightning_jax.rollouts.results.metrics import eval_metrics
from lightning_jax.studio.results import Calls
from lightning_jax.studio.tables import Grid, columns
from lightning_jax.system.text import printable
from lightning_jax.train.monitors import findings
from lightning_jax.types import Metrics, Rollout

MAX_COLUMNS = 5  # of the agent's own numbers; the others are listed below the table
MAX_CHANGES = 10  # tasks in a comparison
SIGNIFICANT = 0.05  # p-value of the sign test
AGENT = "eval/agent_"  # the agent's own numbers in `eval_metrics`


def no_call_share(rollouts: Sequence[Rollout], calls: Mapping[str, Calls]) -> float:
    """Return the share of the scored rollouts that made no call."""
    scored = [calls[r.rollout_id] for r in rollouts if r.status == "scored"]
    return sum(found.number == 0 for found in scored) / max(len(scored), 1)


def cut_share(rollouts: Sequence[Rollout], calls: Mapping[str, Calls]) -> float | None:
    """Return the share of the responses that ended at the token limit, or None if unknown."""
    found = [calls[rollout.rollout_id] for rollout in rollouts]
    total = sum(part.num_responses for part in found)
    return sum(part.num_cut for part in found) / total if total else None


def learning_notes(
    rollouts: Sequence[Rollout], calls: Mapping[str, Calls], *, has_equal_rewards: bool = False
) -> list[str]:
    """Return what would keep training from learning from such rollouts, as lines."""
    row = {
        "rollout/num_scored": 1.0,  # so that the next number is a share
        "rollout/dropped_no_calls": no_call_share(rollouts, calls),
        "rollout/cut_short_share": cut_share(rollouts, calls) or 0.0,
        "train/equal_groups_share": float(has_equal_rewards),
    }
    return [f"note: {finding.sentence}" for finding in findings(row)]


def evaluation_table(parts: Mapping[str, Sequence[Rollout]], calls: Mapping[str, Calls]) -> Grid:
    """Return a line for each part, such as all rollouts or those of one kind of task.

    The error is the standard error of the mean over tasks.
    """
    metrics = {name: eval_metrics(rollouts) for name, rollouts in parts.items()}
    numbers = dict.fromkeys(
        name.removeprefix(AGENT).removesuffix("_mean")
        for found in metrics.values()
        for name in found
        if name.startswith(AGENT)
    )
    shown, others = list(numbers)[:MAX_COLUMNS], list(numbers)[MAX_COLUMNS:]
    names = ("n", "reward", "failed", "no call", "calls", "cut", *map(printable, shown))
    rows = tuple(
        (
            printable(part),
            f"{found['eval/num_tasks']:.0f}",
            _reward(found),
            f"{_num_failed(found):.0f}",
            f"{no_call_share(parts[part], calls):.0%}",
            _calls(parts[part], calls),
            _share(cut_share(parts[part], calls)),
            *(_number(found, name) for name in shown),
        )
        for part, found in metrics.items()
    )
    notes = tuple(
        printable(f"{part}: " + "  ".join(f"{n} {_number(found, n)}" for n in others))
        for part, found in metrics.items()
        if others
    )
    return Grid("", columns("tasks", *names, numbers=names), rows, notes)


def _reward(metrics: Metrics) -> str:
    if "eval/reward_mean" not in metrics:
        return ""
    return f"{metrics['eval/reward_mean']:.3f} ± {metrics['eval/reward_stderr']:.3f}"


def _num_failed(metrics: Metrics) -> float:
    return metrics["eval/num_agent_failures"] + metrics["eval/num_infrastructure_failures"]


def _calls(rollouts: Sequence[Rollout], calls: Mapping[str, Calls]) -> str:
    total = sum(calls[rollout.rollout_id].number for rollout in rollouts)
    return f"{total / max(len(rollouts), 1):.1f}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _number(metrics: Metrics, name: str) -> str:
    value = metrics.get(f"{AGENT}{name}_mean")
    return "" if value is None else f"{value:.3f}"


def comparison_table(
    comparison: TaskComparison, title: str, before: str = "before", after: str = "after"
) -> Grid:
    """Return the tasks that changed most, and what the sign test says, as a table."""
    found, number = comparison, len(comparison.changes)
    common = f"{number} common tasks"
    if found.num_only_before or found.num_only_after:
        common += (
            f"; {found.num_only_before} only in {before}, {found.num_only_after} only in {after}"
        )
    notes = [common]
    if found.change_mean is not None:
        notes.append(
            f"reward {found.change_mean:+.3f} ± {found.change_stderr:.3f}; {found.num_won} won, "
            f"{found.num_lost} lost, {found.num_equal} equal; {_verdict(found)}"
        )
    changed = [change for change in found.changes if change.change]
    if len(changed) > MAX_CHANGES:
        notes.append(f"the {MAX_CHANGES} tasks that differ most are shown, of {len(changed)}")
    numbers = (before, after, "change")
    rows = tuple(
        (
            printable(change.task_id),
            f"{change.before:.3f}",
            f"{change.after:.3f}",
            f"{change.change:+.3f}",
        )
        for change in changed[:MAX_CHANGES]
    )
    head = columns("task", *numbers, numbers=numbers)
    return Grid(title, head, rows, tuple(map(printable, notes)))


def _verdict(comparison: TaskComparison) -> str:
    """Return what the sign test says."""
    p = comparison.p_value
    if p < SIGNIFICANT:
        return f"chance alone rarely splits them so unevenly (sign test, p = {p:.2g})"
    return f"chance alone may split them so (sign test, p = {p:.2g})"
