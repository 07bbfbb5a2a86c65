"""Stored attempts of a run, as what the steps of another run learn from.

Policy steps take whole groups, as the steps of that run did. Supervised steps imitate chosen
attempts, with the token ids in the store: rejection sampling, or a round of RAFT (2304.06767).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_jax.models.formats.find import load_tokenizer
from lightning_jax.rl.advantages import stands_out
from lightning_jax.rl.batches.batching import make_supervised_sequences
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rollouts.conditions import Condition, Value, parse_condition
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.config import Config, LearnConfig
from lightning_jax.train.directory import SETTINGS, STORE
from lightning_jax.train.tasks.data import evenly_spaced
from lightning_jax.train.tasks.source import Group, Source, completed
from lightning_jax.types import FINISHED, Rollout, Trajectory, Transition

log = logging.getLogger(__name__)

ATTEMPT_NAMES = ("reward", "step", "index", "calls", "tokens", "task")


@dataclass(frozen=True)
class Attempt:
    """Finished rollout with the calls that train, as they were sampled."""

    rollout: Rollout
    trajectory: Trajectory

    @property
    def can_teach(self) -> bool:
        """True if its agent did not fail and it has calls to learn from."""
        return not self.trajectory.is_failed and bool(self.trajectory.transitions)

    @property
    def total_reward(self) -> float:
        """Reward of the attempt and of its calls."""
        calls = self.trajectory.transitions
        return self.trajectory.reward + sum((call.reward for call in calls), start=0.0)

    @property
    def values(self) -> dict[str, Value]:
        """Values that a condition may read. `ATTEMPT_NAMES` hide metrics."""
        calls = self.trajectory.transitions
        return {
            **self.rollout.metrics,
            **self.rollout.components,
            "reward": self.trajectory.reward,
            "step": self.rollout.step,
            "index": self.rollout.index,
            "calls": len(calls),
            "tokens": sum(len(call.response_token_ids) for call in calls),
            "task": self.rollout.task_id,
        }


class StoredGroups(Source):
    """Groups of another run, in the steps that trained on them. After the last, the first comes."""

    def __init__(self, path: Path, steps: Sequence[Sequence[Rollout]]) -> None:
        """`path` is the store of the other run."""
        self.store, self._steps = Store(path, read_only=True), steps

    async def take(self, step: int, number: int) -> list[Group]:
        """Return the groups of one step of the other run, whatever their number."""
        groups = _by_group(self._steps[step % len(self._steps)]).values()
        return [
            Group((step, index), step, {"id": rollouts[0].task_id}, completed(rollouts))
            for index, rollouts in enumerate(groups)
        ]

    async def close(self) -> None:
        self.store.close()


Stored = list[list[Any]]  # rollouts by policy step, or attempts by group for supervised steps


def read_stored(
    config: Config, rescored: Mapping[str, Rollout] | None = None
) -> tuple[Config, Stored]:
    """Return (the settings with the number of steps, what they learn from) for `config.learn`.

    Without a number in the settings, each group comes once. `rescored` has rollouts with other
    rewards, by their id; others are left out then. Raises ConfigError if nothing can be learned.
    """
    learn = config.learn
    assert learn.run is not None, "a run is named"
    with closing(Store(Path(learn.run) / STORE, read_only=True)) as store:
        if rescored is None and learn.num_groups is not None:
            some = evenly_spaced(finished_groups(store, learn.phase), learn.num_groups)
            rescored = {rollout.rollout_id: rollout for group in some for rollout in group}
        if not learn.supervised:
            steps = _steps(store, learn, config.rollout.tasks_per_step, rescored)
            config = replace(config, num_steps=learn.num_steps or len(steps))
            return config, steps
        reader = TraceReader(
            *(config.roles, config.reward_rules, load_tokenizer(config.model.name).decode),
            *(config.policy_table, config.rollout),
        )
        groups = _imitated(store, learn, reader, rescored)
    num_steps = learn.num_steps or -(-len(groups) // config.warmup.groups_per_step)
    config = replace(config, num_steps=0, warmup=replace(config.warmup, num_steps=num_steps))
    return config, groups


def _steps(
    store: Store, learn: LearnConfig, per_step: int, rescored: Mapping[str, Rollout] | None
) -> list[list[Rollout]]:
    """Return the rollouts of each policy step.

    The steps are those of the run, unless groups are left out or its `rollout.tasks_per_step` is
    not `per_step`. Then each has that many groups in the same order.
    """
    saved = str(Path(learn.run or "") / SETTINGS)
    of_run = load_config(Config, [saved], only=["rollout", "algorithm"]).rollout
    whole, steps = (stored_steps(store, learn.phase, some) for some in (None, rescored))
    num_groups = len(_by_group(rollout for step in steps for rollout in step))
    if not num_groups:
        raise ConfigError.empty(
            "--phase",
            f"run {learn.run} has no scored {learn.phase} rollouts to learn from; choose another "
            "--phase.",
        )
    is_less = num_groups < len(_by_group(rollout for step in whole for rollout in step))
    if per_step != of_run.tasks_per_step or is_less:
        steps = regroup(steps, per_step)
    log.info("learning from %d groups in %d steps", num_groups, len(steps))
    return steps


def _imitated(
    store: Store, learn: LearnConfig, reader: TraceReader, rescored: Mapping[str, Rollout] | None
) -> list[list[Attempt]]:
    """Return the attempts that supervised steps imitate, by group."""
    attempts = stored_attempts(store, reader, learn.phase, rescored)
    condition = parse_condition(learn.where)
    groups = choose_attempts(attempts, condition, only_best=learn.only_best)
    number = sum(map(len, groups))
    log.info("learning from %d of %d attempts, in %d groups", number, len(attempts), len(groups))
    return groups


def finished_groups(store: Store, phase: str) -> list[list[Rollout]]:
    """Return the finished rollouts of each group, failed ones included, in order."""
    rollouts = (r for r in store.rollouts(phase=phase) if r.status in FINISHED)
    return list(_by_group(rollout for rollout in rollouts if not rollout.superseded).values())


def _by_group(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """Return the rollouts of each group, by its id."""
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    return groups


def stored_steps(
    store: Store,
    phase: str,
    rescored: Mapping[str, Rollout] | None = None,
    *,
    only_trained: bool = True,
) -> list[list[Rollout]]:
    """Return the rollouts with a reward of each step of a run, failed ones included, in order.

    The groups of a step are those that it trained on. With `only_trained`, groups that no step took
    are left out, unless the store is older than its record of them. `rescored` has rollouts with
    other rewards, by their id; others are left out then.
    """
    candidates = (
        stored if rescored is None else rescored.get(stored.rollout_id)
        for stored in store.rollouts(phase=phase)
        if not stored.superseded
    )
    groups = _by_group(
        rollout
        for rollout in candidates
        if rollout is not None and rollout.status in FINISHED and rollout.reward is not None
    )
    recorded = store.all_step_groups() if phase == "train" else {}
    recorded_ids = {group_id for names in recorded.values() for group_id in names}
    first = min(recorded, default=math.inf) if only_trained else math.inf
    steps = defaultdict(list, recorded)
    for group_id, members in groups.items():
        if group_id not in recorded_ids and members[0].step < first:
            steps[members[0].step].append(group_id)
    rollouts = [
        [rollout for group_id in steps[step] for rollout in groups.get(group_id, ())]
        for step in sorted(steps)
    ]
    return [step for step in rollouts if step]


def regroup(steps: Sequence[Sequence[Rollout]], per_step: int) -> list[list[Rollout]]:
    """Return the same rollouts in steps of `per_step` groups, of which the last may have fewer."""
    members = list(_by_group(rollout for step in steps for rollout in step).values())
    return [
        [rollout for group in members[start : start + per_step] for rollout in group]
        for start in range(0, len(members), per_step)
    ]


def stored_attempts(
    store: Store,
    reader: TraceReader,
    phase: str,
    rescored: Mapping[str, Rollout] | None = None,
) -> list[Attempt]:
    """Return the attempts of `stored_steps` and those that no step took, in order."""
    attempts = []
    for rollouts in stored_steps(store, phase, rescored, only_trained=False):
        by_id = {rollout.rollout_id: rollout for rollout in rollouts}
        trajectories = reader.read(store, rollouts).trained
        attempts += [Attempt(by_id[t.rollout_id], t) for t in trajectories]
    return attempts


def choose_attempts(
    attempts: Sequence[Attempt], condition: Condition, *, only_best: bool
) -> list[list[Attempt]]:
    """Return the attempts that can teach and for which the condition holds, by group.

    With `only_best`, only the best of each group is left if it `stands_out` in its whole group; of
    equal ones the first. Raises ConfigError if the condition has a name that no attempt has, or if
    no attempt is left.
    """
    names = {name for attempt in attempts for name in attempt.values} | {*ATTEMPT_NAMES}
    if unknown := sorted(condition.names - names):
        raise ConfigError.unknown(
            unknown[0],
            f"--where has the name {unknown[0]!r}, which no attempt has; use one of "
            f"{', '.join(sorted(names))}.",
        )
    groups: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if attempt.can_teach and condition.holds(attempt.values):
            groups[attempt.rollout.group_id].append(attempt)
    if not groups:
        raise ConfigError.empty(
            "--where",
            f"--where {condition.text!r} holds for none of {len(attempts)} attempts; relax it.",
        )
    if not only_best:
        return list(groups.values())
    earned: dict[str, list[float]] = defaultdict(list)
    for attempt in attempts:
        earned[attempt.rollout.group_id].append(attempt.total_reward)
    best = [max(group, key=lambda attempt: attempt.total_reward) for group in groups.values()]
    best_of_groups = [
        [attempt]
        for attempt in best
        if stands_out(attempt.total_reward, np.asarray(earned[attempt.rollout.group_id]))
    ]
    if not best_of_groups:
        raise ConfigError.empty(
            "--best",
            "--best finds no attempt above the mean of its group or with a reward of 1; drop "
            "--best, or choose attempts with --where.",
        )
    return best_of_groups


def attempt_sequences(
    groups: Sequence[Sequence[Attempt]], indices: Mapping[str, int]
) -> list[TrainingSequence]:
    """Return one sequence per call, with the token ids that were sampled.

    All tokens that a policy sampled have the same weight. Tokens that a grammar forced are only
    read. `indices` are those of several policies.
    """
    calls: dict[int | None, list[Transition]] = defaultdict(list)
    for attempt in (attempt for group in groups for attempt in group):
        for call in attempt.trajectory.transitions:
            calls[indices.get(call.answered_by)].append(call)
    return [
        replace(
            sequence, adapter=index, loss_mask=tuple(not is_forced for is_forced in call.forced)
        )
        for index, some in calls.items()
        for call, sequence in zip(
            some,
            make_supervised_sequences([(c.prompt_token_ids, c.response_token_ids) for c in some]),
            strict=True,
        )
    ]
