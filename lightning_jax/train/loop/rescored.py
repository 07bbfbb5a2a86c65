"""Stored rollouts of a run with the rewards of other components."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path

from lightning_jax.errors import UserError
from lightning_jax.models.formats.find import load_tokenizer
from lightning_jax.rollouts.config import RewardConfig
from lightning_jax.rollouts.rewards.scoring import RewardScorer, make_scorer
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.traces.store import Store, TemporaryStore
from lightning_jax.train.config import Config, LearnConfig
from lightning_jax.train.directory import SETTINGS, STORE
from lightning_jax.train.loop.check import check_judges
from lightning_jax.train.loop.inference import PolicySource, serve_policies
from lightning_jax.train.loop.startup import with_dtypes
from lightning_jax.train.tasks.data import evenly_spaced, load_tasks
from lightning_jax.train.tasks.stored import finished_groups
from lightning_jax.types import Rollout, Task

# Sections of the run's settings. `rollout.ahead` is checked against `algorithm`.
READ = ["run_dir", "seed", "model", "data", "serve", "rollout", "algorithm", "mesh"]
# As stored, and with the other components. Rollouts that their agent failed stay as they are.
Pair = tuple[Rollout, Rollout]


async def rescore(learn: LearnConfig, rewards: Mapping[str, RewardConfig]) -> dict[str, Rollout]:
    """Return the rollouts that `learn` names with these rewards, by their id."""
    assert learn.run is not None, "a run is named"
    groups = await rescored_groups(
        Path(learn.run), rewards, phase=learn.phase, limit=learn.num_groups
    )
    return {after.rollout_id: after for group in groups for _, after in group}


async def rescored_groups(
    run_dir: Path, rewards: Mapping[str, RewardConfig], *, phase: str, limit: int | None = None
) -> list[list[Pair]]:
    """Return the rollouts of each group of a run, scored by these components.

    Groups have the rollouts that their agent failed, too. Verdicts of judges are kept in the run's
    store. `limit` is the number of groups, evenly spaced. Raises UserError if nothing can be
    scored.
    """
    saved = load_config(Config, [str(run_dir / SETTINGS)], only=READ)
    serve = replace(saved.serve, host="127.0.0.1", port=0, api_key=None)
    config = replace(saved, run_dir=str(run_dir), rewards=dict(rewards), serve=serve)
    check_judges(config.chat_models.values())
    with closing(Store(run_dir / STORE)) as store:
        groups = finished_groups(store, phase)
        groups = evenly_spaced(groups, limit or len(groups))
        if not any(_was_scored(rollout) for group in groups for rollout in group):
            raise ConfigError.empty(
                "--phase",
                f"{run_dir} has no scored rollouts of phase {phase}; choose another --phase.",
            )
        tasks: dict[str, Task] = {}
        with suppress(UserError):
            tasks = {str(task["id"]): task for split in load_tasks(config) for task in split}
        async with _open_scorer(config, store) as scorer:
            rescored = await _rescored(scorer, store, groups, tasks)
    pairs = scored_pairs(rescored)
    if not any(after.status == "scored" for _, after in pairs):
        first = pairs[0][1]
        raise UserError(
            f"none of {len(pairs)} rollouts could be scored; first: {first.rollout_id}: "
            f"{first.reason}: {first.detail}",
            reason="not_scored",
            key=first.rollout_id,
        )
    return rescored


def scored_pairs(groups: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Return the pairs of rollouts that components see."""
    return [pair for group in groups for pair in group if _was_scored(pair[0])]


def _was_scored(rollout: Rollout) -> bool:
    return rollout.status == "scored"


async def _rescored(
    scorer: RewardScorer,
    store: Store,
    groups: Sequence[Sequence[Rollout]],
    tasks: Mapping[str, Task],
) -> list[list[Pair]]:
    """Score the groups by the task of that id or, without one, as the store recorded it."""
    names = scorer.components(groups[0][0].phase)
    scoring = []
    for group in groups:
        first = group[0]
        task = tasks.get(first.task_id) or {
            "id": first.task_id,
            **store.task_fields(first.rollout_id),
        }
        scoring.append(scorer.rescore(task, list(filter(_was_scored, group)), names))
    rescored = [rollouts for rollouts, _ in await asyncio.gather(*scoring)]
    by_id = {rollout.rollout_id: rollout for rollouts in rescored for rollout in rollouts}
    return [[(r, by_id.get(r.rollout_id, r)) for r in group] for group in groups]


@asynccontextmanager
async def _open_scorer(config: Config, store: Store) -> AsyncIterator[RewardScorer]:
    """Yield a scorer, and serve the initial weights as long as a judge needs them."""
    async with AsyncExitStack() as at_end:
        gateway = None
        if config.initial_users:
            calls = at_end.enter_context(closing(TemporaryStore()))
            gateway = serve_policies(with_dtypes(config), PolicySource(), calls)
            at_end.callback(gateway.engine.close)
            gateway.engine.start()
            await at_end.enter_async_context(gateway)
        decode = load_tokenizer(config.model.name).decode
        scorer = make_scorer(config.rewards, store, decode, config.rollout, config.seed, gateway)
        assert scorer is not None, "there are components"
        yield scorer
