"""`lightning-jax rescore`: rewards of a run's stored rollouts by other components."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from rich.console import Console

from lightning_jax.cli.from_stored import print_policy
from lightning_jax.errors import UserError
from lightning_jax.models.formats.sources import load_tokenizer
from lightning_jax.rollouts.config import AGENT
from lightning_jax.rollouts.results.metrics import earned
from lightning_jax.rollouts.rewards.components import component_metrics, flipped, rank_correlation
from lightning_jax.rollouts.rewards.scoring import Scorer, make_scorer
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.studio.tables import Grid, as_terminal, columns
from lightning_jax.traces.store import Store, TemporaryStore
from lightning_jax.train.check import check_judges
from lightning_jax.train.config import Config
from lightning_jax.train.data import evenly_spaced, load_tasks
from lightning_jax.train.directory import SETTINGS, STORE
from lightning_jax.train.inference import PolicySource, serve_policies
from lightning_jax.train.startup import with_dtypes
from lightning_jax.types import FINISHED, Rollout, Task

# Sections of the run's settings. `rollout.ahead` is checked against `algorithm`.
READ = ["run_dir", "seed", "model", "data", "serve", "rollout", "algorithm", "mesh"]
# As stored, and with the other components. Rollouts that their agent failed stay as they are.
Pair = tuple[Rollout, Rollout]


@dataclass(frozen=True)
class Comparison:
    """Change of the rewards of stored rollouts."""

    num_groups: int  # with a rollout that its agent did not fail
    num_failed: int  # rollouts that a component failed
    correlations: tuple[float, ...]  # of groups in which both rewards differ
    flip_share: float | None  # rollouts whose advantage changes its sign


def rescore(
    run_dir: Path, file: Path, *, phase: str, limit: int | None
) -> tuple[Config, list[list[Pair]]]:
    """Print how the rewards of a run's rollouts change with the `rewards` of a YAML file.

    The run's rewards stay as they are. Verdicts of judges are kept in its store. Evaluations also
    have a line each. `limit` is the number of groups, evenly spaced. Returns what `rescored_groups`
    does. Raises UserError if nothing can be scored.
    """
    config, pairs = rescored_groups(run_dir, file, phase=phase, limit=limit)
    console = Console(highlight=False)
    console.print(as_terminal(_grid(config, pairs), console.width))
    if phase == "eval":
        console.print("", as_terminal(by_evaluation(pairs), console.width), sep="\n")
    return config, pairs


def train_rescored(
    run_dir: Path,
    config: Config,
    scored: tuple[Config, list[list[Pair]]],
    *,
    phase: str,
    num_steps: int | None,
    start: Literal["policy", "model"],
) -> None:
    """Train on the rescored rollouts, and print what came out.

    Raises UserError if nothing can be learned.
    """
    from lightning_jax.train.offline import learn_from_rewards

    config = replace(config, rewards=scored[0].rewards)
    rollouts = [after for group in scored[1] for _, after in group if after.reward is not None]
    rows = learn_from_rewards(
        run_dir,
        config,
        {rollout.rollout_id: rollout for rollout in rollouts},
        phase=phase,
        num_steps=num_steps,
        start=start,
    )
    updates = sum(row.get("train/num_updates", 0.0) for row in rows)
    if not updates:
        raise UserError(
            "nothing was trained: the attempts of every group earn the same by these rewards; "
            "give a component that tells them apart a weight",
            reason="no_gradient",
            key="rewards",
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(rows)} steps, {updates:.0f} updates")
    print_policy(console, config.run_dir)


def rescored_groups(
    run_dir: Path, file: Path, *, phase: str, limit: int | None = None
) -> tuple[Config, list[list[Pair]]]:
    """Return (the run's settings with the `rewards` of a YAML file, its rollouts scored by them).

    Groups have the rollouts that their agent failed, too. Raises UserError if nothing can be
    scored.
    """
    saved = load_config(Config, [str(run_dir / SETTINGS)], only=READ)
    rewards = load_config(Config, [str(file)], only=["rewards"]).rewards
    if not rewards:
        raise ConfigError(
            f"{file} has no rewards; add a section rewards.", reason="missing", key="rewards"
        )
    serve = replace(saved.serve, host="127.0.0.1", port=0, api_key=None)
    config = replace(saved, run_dir=str(run_dir), rewards=rewards, serve=serve)
    check_judges(config)
    with closing(Store(run_dir / STORE)) as store:
        groups = _groups(store, phase)
        groups = evenly_spaced(groups, limit or len(groups))
        if not any(_was_scored(rollout) for group in groups for rollout in group):
            raise ConfigError(
                f"{run_dir} has no scored rollouts of phase {phase}; choose another --phase.",
                reason="empty",
                key="--phase",
            )
        rescored = asyncio.run(_rescored(config, store, groups))
    pairs = _scored_pairs(rescored)
    if not any(after.status == "scored" for _, after in pairs):
        first = pairs[0][1]
        raise UserError(
            f"none of {len(pairs)} rollouts could be scored; first: {first.rollout_id}: "
            f"{first.reason}: {first.detail}",
            reason="not_scored",
            key=first.rollout_id,
        )
    return config, rescored


def compare(groups: Sequence[Sequence[Pair]]) -> Comparison:
    """Return how the rewards of the rollouts of each group change."""
    correlations, flips, num_failed, num_groups = [], [], 0, 0
    for scored in (_scored_pairs([group]) for group in groups):
        num_groups += bool(scored)
        kept = [(a.reward, b.reward) for a, b in scored if b.status == "scored"]
        num_failed += len(scored) - len(kept)
        before = [a or 0.0 for a, _ in kept]
        after = [b or 0.0 for _, b in kept]
        if (found := rank_correlation(before, after)) is not None:
            correlations.append(found)
        flips += flipped(before, after) if kept else []
    share = fmean(flips) if flips else None
    return Comparison(num_groups, num_failed, tuple(correlations), share)


def _groups(store: Store, phase: str) -> list[list[Rollout]]:
    """Return the finished rollouts of each group, in order."""
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in store.rollouts(phase=phase):
        if rollout.status in FINISHED and not rollout.superseded:
            groups[rollout.group_id].append(rollout)
    return list(groups.values())


def _was_scored(rollout: Rollout) -> bool:
    return rollout.status == "scored"


def _scored_pairs(groups: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Return the pairs of rollouts that components see."""
    return [pair for group in groups for pair in group if _was_scored(pair[0])]


async def _rescored(
    config: Config, store: Store, groups: Sequence[Sequence[Rollout]]
) -> list[list[Pair]]:
    tasks = _tasks(config, store, groups)
    async with _open_scorer(config, store) as scorer:
        names = scorer.components(groups[0][0].phase)
        scoring = [
            scorer.rescore(task, list(filter(_was_scored, group)), names)
            for task, group in zip(tasks, groups, strict=True)
        ]
        found = [changed for changed, _ in await asyncio.gather(*scoring)]
    by_id = {rollout.rollout_id: rollout for changed in found for rollout in changed}
    return [[(r, by_id.get(r.rollout_id, r)) for r in group] for group in groups]


@asynccontextmanager
async def _open_scorer(config: Config, store: Store) -> AsyncIterator[Scorer]:
    """Yield a scorer, and serve the initial weights as long as a judge needs them."""
    async with AsyncExitStack() as at_end:
        gateway = None
        if config.initial_users:
            calls = at_end.enter_context(closing(TemporaryStore()))
            gateway, engines = serve_policies(with_dtypes(config), PolicySource(), calls)
            for engine in engines:
                at_end.callback(engine.close)
                engine.start()
            await at_end.enter_async_context(gateway)
        decode = load_tokenizer(config.model.name).decode
        made = make_scorer(config.rewards, store, decode, config.rollout, config.seed, gateway)
        assert made is not None, "there are components"
        yield made


def _tasks(config: Config, store: Store, groups: Sequence[Sequence[Rollout]]) -> list[Task]:
    """Return the task of each group: as the run's data have it, else as the store recorded it."""
    known: dict[str, Task] = {}
    with suppress(UserError):
        known = {str(task["id"]): task for tasks in load_tasks(config) for task in tasks}
    first = [group[0] for group in groups]
    return [
        known.get(r.task_id) or {"id": r.task_id, **store.task_fields(r.rollout_id)} for r in first
    ]


def _grid(config: Config, groups: Sequence[Sequence[Pair]]) -> Grid:
    pairs = _scored_pairs(groups)
    means = component_metrics([after for _, after in pairs], "")
    rows = []
    for name in dict.fromkeys((*config.rewards, AGENT)):
        weight = config.rewards[name].weight if name in config.rewards else 0.0
        if f"{name}_mean" in means:
            mean, std = means[f"{name}_mean"], means[f"{name}_std"]
            rows.append((name, f"{weight:g}", f"{mean:.4f}", f"{std:.4f}"))
    for name, rollouts in (("stored reward", 0), ("new reward", 1)):
        values = [r.reward for r in (pair[rollouts] for pair in pairs) if r.reward is not None]
        if values:
            rows.append((name, "", f"{fmean(values):.4f}", ""))
    found = compare(groups)
    notes = [f"rollouts: {len(pairs)} of {found.num_groups} groups"]
    if found.num_failed:
        failed = next(after for _, after in pairs if after.status != "scored")
        example = f"{failed.rollout_id}: {failed.reason}: {failed.detail}"
        notes.append(f"failed by a component: {found.num_failed}, such as {example}")
    if found.correlations:
        of = f"{len(found.correlations)} groups in which both rewards differ"
        notes.append(
            f"rank correlation with the stored reward: {fmean(found.correlations):.3f} "
            f"(mean over {of})"
        )
    if found.flip_share is not None:
        notes.append(f"rollouts whose advantage changes its sign: {found.flip_share:.1%}")
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
