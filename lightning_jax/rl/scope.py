"""Policies that share something: weights, or the credit of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_jax.models.config import PolicyConfig
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.types import Trajectory, Transition, keep_calls

Item = TypeVar("Item")


@dataclass(frozen=True)
class PolicyScope:
    """One policy of a run, or all of them (`ALL`), which includes a run of a single policy."""

    policy: str = ""  # "": all policies
    index: int = 0  # of the policy in the settings, and so of its adapter or weights
    trains: bool = True  # False: only the warm-up trains it
    base: str | None = None  # model that its weights start from; None: that of the run

    @property
    def suffix(self) -> str:
        """Ending of the names of its metrics."""
        return f"/policy={self.policy}" if self.policy else ""

    def has(self, call: Transition) -> bool:
        """Return True if a policy of the scope answered the call."""
        return self.policy in ("", call.answered_by)

    def calls(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return all trajectories, reduced to the scope's calls."""
        return [keep_calls(trajectory, self.has) for trajectory in trajectories]

    def values(
        self, trajectories: Sequence[Trajectory], values: Sequence[Sequence[Item]]
    ) -> list[tuple[Item, ...]]:
        """Return the values of the calls that `calls` keeps, from those of all calls."""
        return [
            tuple(v for c, v in zip(trajectory.transitions, items, strict=True) if self.has(c))
            for trajectory, items in zip(trajectories, values, strict=True)
        ]


ALL = PolicyScope()


def scopes_of(policies: Mapping[str, PolicyConfig]) -> tuple[PolicyScope, ...]:
    """Return a scope for each policy, in order, or `ALL` if there are no policies."""
    return tuple(
        PolicyScope(name, index, policy.trains, policy.base)
        for index, (name, policy) in enumerate(policies.items())
    ) or (ALL,)


def credit_scopes(
    algorithm: AlgorithmConfig, policies: Mapping[str, PolicyConfig]
) -> tuple[PolicyScope, ...]:
    """Return the policies that learn from their own calls, or `ALL` if they learn jointly."""
    if algorithm.policy_updates == "joint":
        return (ALL,)
    return tuple(scope for scope in scopes_of(policies) if scope.trains)


def pack_by_policy(scopes: Sequence[PolicyScope], items: Sequence[Item]) -> Any:
    """Return the items of the scopes by policy, or the item of `ALL` by itself.

    Checkpoints have this structure.
    """
    by_policy = {scope.policy: item for scope, item in zip(scopes, items, strict=True)}
    return by_policy.get("", by_policy)


def unpack_by_policy(scopes: Sequence[PolicyScope], packed: Any) -> list[Any]:
    """Return the items that `pack` packed, in the order of the scopes."""
    return [packed[scope.policy] if scope.policy else packed for scope in scopes]
