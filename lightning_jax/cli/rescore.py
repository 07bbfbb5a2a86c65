"""`lightning-jax rescore`: rewards of a run's stored rollouts by other components."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from lightning_jax.rollouts.config import AGENT, RewardConfig
from lightning_jax.rollouts.results.metrics import earned
from lightning_jax.rollouts.rewards.components import component_metrics, flipped, rank_correlation
from lightning_jax.studio.records import Grid, columns
from lightning_jax.studio.terminal import as_terminal
from lightning_jax.train.loop.check import read_rewards
from lightning_jax.train.loop.rescored import Pair, rescored_groups, scored_pairs


@dataclass(frozen=True)
class RewardComparison:
    """Change of the rewards of stored rollouts."""

    num_groups: int  # with a rollout that its agent did not fail
    num_failed: int  # rollouts that a component failed
    correlations: tuple[float, ...]  # of groups in which both rewards differ
    flip_share: float | None  # rollouts whose advantage changes its sign


def rescore(run_dir: Path, file: Path, *, phase: str, limit: int | None) -> None:
    """Print how the rewards of a run's rollouts change with the `rewards` of a YAML file.

    The run's rewards stay as they are. Verdicts of judges are kept in its store. Evaluations also
    have a line each. `limit` is the number of groups, evenly spaced. Raises UserError if nothing
    can be scored.
    """
    rewards = read_rewards(file)
    groups = asyncio.run(rescored_groups(run_dir, rewards, phase=phase, limit=limit))
    console = Console(highlight=False)
    console.print(as_terminal(_grid(rewards, groups), console.width))
    if phase == "eval":
        console.print("", as_terminal(by_evaluation(groups), console.width), sep="\n")


def compare_rewards(groups: Sequence[Sequence[Pair]]) -> RewardComparison:
    """Return how the rewards of the rollouts of each group change."""
    correlations, flips, num_failed, num_groups = [], [], 0, 0
    for scored in (scored_pairs([group]) for group in groups):
        num_groups += bool(scored)
        kept = [(a.reward, b.reward) for a, b in scored if b.status == "scored"]
        num_failed += len(scored) - len(kept)
        before = [a or 0.0 for a, _ in kept]
        after = [b or 0.0 for _, b in kept]
        if (correlation := rank_correlation(before, after)) is not None:
            correlations.append(correlation)
        flips += flipped(before, after) if kept else []
    share = fmean(flips) if flips else None
    return RewardComparison(num_groups, num_failed, tuple(correlations), share)


def _grid(rewards: Mapping[str, RewardConfig], groups: Sequence[Sequence[Pair]]) -> Grid:
    pairs = scored_pairs(groups)
    means = component_metrics([after for _, after in pairs], "")
    rows = []
    for name in dict.fromkeys((*rewards, AGENT)):
        weight = rewards[name].weight if name in rewards else 0.0
        if f"{name}_mean" in means:
            mean, std = means[f"{name}_mean"], means[f"{name}_std"]
            rows.append((name, f"{weight:g}", f"{mean:.4f}", f"{std:.4f}"))
    for name, rollouts in (("stored reward", 0), ("new reward", 1)):
        values = [r.reward for r in (pair[rollouts] for pair in pairs) if r.reward is not None]
        if values:
            rows.append((name, "", f"{fmean(values):.4f}", ""))
    change = compare_rewards(groups)
    notes = [f"rollouts: {len(pairs)} of {change.num_groups} groups"]
    if change.num_failed:
        failed = next(after for _, after in pairs if after.status != "scored")
        example = f"{failed.rollout_id}: {failed.reason}: {failed.detail}"
        notes.append(f"failed by a component: {change.num_failed}, such as {example}")
    if change.correlations:
        of = f"{len(change.correlations)} groups in which both rewards differ"
        notes.append(
            f"rank correlation with the stored reward: {fmean(change.correlations):.3f} "
            f"(mean over {of})"
        )
    if change.flip_share is not None:
        notes.append(f"rollouts whose advantage changes its sign: {change.flip_share:.1%}")
    numbers = ("weight", "mean", "std")
    return Grid("", columns("component", *numbers, numbers=numbers), tuple(rows), tuple(notes))


def by_evaluation(groups: Sequence[Sequence[Pair]]) -> Grid:
    """Return the stored and the new means of each evaluation, a line per step.

    A rollout that its agent failed counts as 0, and one that a component failed is left out.
    """
    steps: dict[int, list[Pair]] = defaultdict(list)
    for before, after in (pair for group in groups for pair in group):
        if after.status == before.status:
            steps[before.step].append((before, after))
    names = list(dict.fromkeys(name for p in steps.values() for _, r in p for name in r.components))
    rows = [
        (
            str(step),
            str(len(pairs)),
            *(f"{fmean(earned(pair[i]) for pair in pairs):.4f}" for i in (0, 1)),
            *(f"{fmean(r.components.get(name, 0.0) for _, r in pairs):.4f}" for name in names),
        )
        for step, pairs in sorted(steps.items())
    ]
    numbers = ("step", "n", "stored reward", "new reward", *names)
    return Grid("", columns(*numbers, numbers=numbers, can_drop=names), tuple(rows))
