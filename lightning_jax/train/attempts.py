"""Stored attempts of a run as demonstrations: which ones, and the sequences made from them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_jax.rl.batching import make_supervised_sequences
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rollouts.conditions import Condition, Value
from lightning_jax.rollouts.metrics import TraceReader, to_trajectories
from lightning_jax.settings import ConfigError
from lightning_jax.traces.store import Store
from lightning_jax.types import Rollout, Trajectory, Transition

ATTEMPT_NAMES = ("reward", "step", "index", "calls", "tokens", "task")


@dataclass(frozen=True)
class Attempt:
    """Scored rollout with the calls that train, as they were sampled."""

    rollout: Rollout
    trajectory: Trajectory

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


def stored_attempts(
    store: Store,
    reader: TraceReader,
    phase: str,
    rescored: Mapping[str, Rollout] | None = None,
) -> list[Attempt]:
    """Return the scored attempts of a phase that have calls to learn from, in order.

    `rescored` has rollouts with other rewards, by their id.
    """
    found = [(rescored or {}).get(r.rollout_id, r) for r in store.rollouts(phase=phase)]
    rollouts = {r.rollout_id: r for r in found if r.status == "scored" and not r.superseded}
    made, _ = to_trajectories(store, list(rollouts.values()), policy_version=0, reader=reader)
    return [Attempt(rollouts[t.rollout_id], t) for t in made if t.transitions]


def choose_attempts(
    attempts: Sequence[Attempt], condition: Condition, *, only_best: bool
) -> list[list[Attempt]]:
    """Return the attempts for which the condition holds, by group.

    With `only_best`, only the best of each group is left; of equal ones the first. Raises
    ConfigError if the condition has a name that no attempt has, or if no attempt is left.
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
        if condition.holds(attempt.values):
            groups[attempt.rollout.group_id].append(attempt)
    if not groups:
        raise ConfigError(
            f"--where {condition.text!r} holds for none of {len(attempts)} attempts; relax it.",
            reason="empty",
            key="--where",
        )
    if not only_best:
        return list(groups.values())
    return [
        [max(group, key=lambda attempt: attempt.trajectory.reward)] for group in groups.values()
    ]


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
