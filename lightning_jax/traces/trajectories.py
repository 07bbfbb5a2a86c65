"""Trajectories of finished rollouts, made from the spans of their calls."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

from lightning_jax.models.policies import SINGLE, PolicyTable
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RewardRule
from lightning_jax.traces.convert import spans_to_transitions, to_trajectory
from lightning_jax.traces.rewards import Decode, apply_rules
from lightning_jax.traces.roles import Roles, assign_roles, only_trained
from lightning_jax.traces.store import Store
from lightning_jax.traces.tree import attach_loose_calls
from lightning_jax.types import Rollout, Span, Trajectory, Transition


@runtime_checkable
class RewardLimits(Protocol):
    """Settings of rewards, such as a run's `rollout`."""

    @property
    def max_abs_reward(self) -> float: ...

    @property
    def agent_failure_reward(self) -> float | None: ...


class DefaultLimits(NamedTuple):
    """Limits where no settings are known."""

    max_abs_reward: float = 1e6
    agent_failure_reward: float | None = 0.0


@dataclass(frozen=True)
class TraceReader:
    """Settings for reading spans: roles and policies of calls, and rules for their rewards."""

    roles: Roles = field(default_factory=dict)
    rules: Mapping[str, RewardRule] = field(default_factory=dict)
    decode: Decode = str  # token ids to text, for the rules' patterns
    policies: PolicyTable = SINGLE
    limits: RewardLimits = field(default_factory=DefaultLimits)
    max_staleness: int | None = None  # in trainer steps; no older call is trained on

    def judge(self, rollout: Rollout, transitions: Sequence[Transition]) -> Rollout:
        """Return the rollout, failed by its agent if its calls' total reward exceeds the limit.

        A rule's reward applies to each event that matches, so an agent could add up any number.
        """
        if is_bounded((call.reward for call in transitions), self.limits.max_abs_reward):
            return rollout
        return replace(
            rollout,
            status="agent_failure",
            reward=self.limits.agent_failure_reward,
            reason="bad_reward",
            detail="the sum of its call rewards exceeds rollout.max_abs_reward",
            metrics={},
        )

    def transitions(
        self, spans: Sequence[Span]
    ) -> tuple[tuple[Transition, ...], dict[str, int], dict[str, int]]:
        """Return (the calls, skipped spans by reason, uses of each rule)."""
        spans = attach_loose_calls(spans)
        transitions, reasons = spans_to_transitions(spans)
        transitions = assign_roles(spans, transitions, self.roles, self.policies)
        transitions, applied = apply_rules(spans, transitions, self.rules, self.decode)
        return transitions, reasons, applied

    def read(self, store: Store, rollouts: Sequence[Rollout]) -> "Reading":
        """Return what the spans of the rollouts say.

        The return of a rollout that its agent failed is at most the lowest return of a scored one.
        """
        reading, trajectories = Reading(self), list[Trajectory]()
        judged, dropped = reading.rollouts, reading.dropped
        for rollout in rollouts:
            judged.append(rollout)
            if rollout.reward is None:
                dropped["no_reward"] += 1
                continue
            spans = store.spans(rollout.rollout_id)
            transitions, reasons, applied = self.transitions(spans)
            dropped.update(reasons)
            reading.rules.update(applied)
            reading.used.update(self._names_used(spans, transitions))
            judged[-1] = self.judge(rollout, transitions)
            if judged[-1] is not rollout:
                transitions = tuple(replace(call, reward=0.0) for call in transitions)
            if judged[-1].reward is None:
                dropped["bad_reward"] += 1
                continue
            if not transitions:
                dropped["no_calls"] += 1
            trajectories.append(to_trajectory(judged[-1], transitions))
        reading.trajectories = cap_failures(trajectories)
        return reading

    def _names_used(self, spans: Sequence[Span], transitions: Sequence[Transition]) -> set[str]:
        """Return the roles and policies of a rollout's calls.

        Calls that another server answered are spans without tokens.
        """
        roles = {call.role for call in transitions}
        roles |= {str(span.attributes.get(attributes.ROLE, "")) for span in spans}
        policies = {call.answered_by for call in transitions}
        return {f"role={name}" for name in roles & self.roles.keys()} | {
            f"policy={name}" for name in policies & self.policies.named.keys()
        }


class Reading:
    """Judged rollouts, trajectories of rollouts with a reward, and counts.

    Rules, roles and policies that nothing used have the count 0. Roles that do not train are left
    out if the last role takes the rest of the calls, because then none trains by mistake.
    """

    def __init__(self, reader: TraceReader) -> None:
        self.rollouts: list[Rollout] = []
        self.trajectories: list[Trajectory] = []
        # Rollouts without a reward, spans without tokens and others, by reason.
        self.dropped: Counter[str] = Counter()
        self.rules: Counter[str] = Counter(dict.fromkeys(reader.rules, 0))  # uses
        has_rest = any(role.fits_all for role in reader.roles.values())
        must_match = {name: role.trains or not has_rest for name, role in reader.roles.items()}
        names = [f"role={name}" for name, is_due in must_match.items() if is_due]
        names += [f"policy={name}" for name in reader.policies.named]
        self.used: Counter[str] = Counter(dict.fromkeys(names, 0))  # rollouts with calls of each

    @property
    def trained(self) -> list[Trajectory]:
        """Trajectories of only the calls that train."""
        return [only_trained(trajectory) for trajectory in self.trajectories]


def cap_failures(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories, with failed ones lowered to the lowest return of the others.

    Otherwise an agent that fails would earn more than one that tries where rewards are negative.
    """

    def call_rewards(trajectory: Trajectory) -> float:
        return sum((call.reward for call in trajectory.transitions), start=0.0)

    scored = [t.reward + call_rewards(t) for t in trajectories if not t.is_failed]
    lowest = min(scored, default=math.inf)
    return [
        replace(t, reward=min(t.reward, lowest - call_rewards(t))) if t.is_failed else t
        for t in trajectories
    ]


def is_bounded(rewards: Iterable[float], limit: float) -> bool:
    """Return True if no reward, nor the sum, has a magnitude above `limit`."""
    values = list(rewards)
    return all(abs(value) <= limit for value in values) and abs(math.fsum(values)) <= limit
