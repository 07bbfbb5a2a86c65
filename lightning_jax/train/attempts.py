"""Stored attempts of a run: the steps that trained on them, and their use as demonstrations."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_jax.rl.advantages import stands_out
from lightning_jax.rl.batching import make_supervised_sequences
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rollouts.conditions import Condition, Value
from lightning_jax.rollouts.results.metrics import to_trajectories
from lightning_jax.settings import ConfigError
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.types import FINISHED, Rollout, Trajectory, Transition

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
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for stored in store.rollouts(phase=phase):
        found = stored if rescored is None else rescored.get(stored.rollout_id)
        if found is None or stored.superseded:
            continue
        if found.status in FINISHED and found.reward is not None:
            groups[found.group_id].append(found)
    recorded = store.all_step_groups() if phase == "train" else {}
    taken = {group_id for names in recorded.values() for group_id in names}
    first = min(recorded, default=math.inf) if only_trained else math.inf
    steps = defaultdict(list, recorded)
    for group_id, members in groups.items():
        if group_id not in taken and members[0].step < first:
            steps[members[0].step].append(group_id)
    rollouts = [
        [rollout for group_id in steps[step] for rollout in groups.get(group_id, ())]
        for step in sorted(steps)
    ]
    return [step for step in rollouts if step]


def regroup(steps: Sequence[Sequence[Rollout]], per_step: int) -> list[list[Rollout]]:
    """Return the same rollouts in steps of `per_step` groups, of which the last may have fewer."""
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in (rollout for step in steps for rollout in step):
        groups[rollout.group_id].append(rollout)
    members = list(groups.values())
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
        made, _ = to_trajectories(store, rollouts, policy_version=0, reader=reader)
        by_id = {rollout.rollout_id: rollout for rollout in rollouts}
        attempts += [Attempt(by_id[t.rollout_id], t) for t in made]
    return attempts


def choose_attempts(
    attempts: Sequence[Attempt], condition: Condition, *, only_best: bool
) -> list[list[Attempt]]:
    """Return the attempts that can teach and for which the condition holds, by group.

    With `only_best`, only the best of each group is left if it `stands_out` in its whole group; of
    equal ones the first. Raises ConfigError if the condition has a name that no attempt has, or if
    no attempt is left.
    """
    known = {name for attempt in attempts for name in attempt.values} | {*ATTEMPT_NAMES}
    if unknown := sorted(condition.names - known):
        raise ConfigError(
            f"--where has the name {unknown[0]!r}, which no attempt has; use one of "
            f"{', '.join(sorted(known))}.",
            reason="unknown",
            key=unknown[0],
        )
    groups: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if attempt.can_teach and condition.holds(attempt.values):
            groups[attempt.rollout.group_id].append(attempt)
    if not groups:
        raise ConfigError(
            f"--where {condition.text!r} holds for none of {len(attempts)} attempts; relax it.",
            reason="empty",
            key="--where",
        )
    if not only_best:
        return list(groups.values())
    earned: dict[str, list[float]] = defaultdict(list)
    for attempt in attempts:
        earned[attempt.rollout.group_id].append(attempt.total_reward)
    best = [max(group, key=lambda attempt: attempt.total_reward) for group in groups.values()]
    found = [
        [attempt]
        for attempt in best
        if stands_out(attempt.total_reward, np.asarray(earned[attempt.rollout.group_id]))
    ]
    if not found:
        raise ConfigError(
            "--best finds no attempt above the mean of its group or with a reward of 1; drop "
            "--best, or choose attempts with --where.",
            reason="empty",
            key="--best",
        )
    return found


def attempt_sequences(
    groups: Sequence[Sequence[Attempt]], adapters: Mapping[str, int]
) -> list[TrainingSequence]:
    """Return one sequence per call, with the token ids that were sampled.

    All tokens that a policy sampled have the same weight. Tokens that a grammar forced are only
    read. `adapters` maps the policies to their adapter indices.
    """
    calls: dict[int | None, list[Transition]] = defaultdict(list)
    for attempt in (attempt for group in groups for attempt in group):
        for call in attempt.trajectory.transitions:
            calls[adapters.get(call.answered_by)].append(call)
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
