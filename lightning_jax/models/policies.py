"""Table of the policies of a run: whose weights answer calls, and who learns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from lightning_jax.models.config import PolicyConfig
from lightning_jax.types import Trajectory, Transition, keep_calls

Item = TypeVar("Item")
INITIAL = "initial"  # row of the weights from the start of the run
TEACHER = "distill.teacher"  # row of the model that scores tokens in the trainer


@dataclass(frozen=True)
class Policy:
    """Row of the table. Without a name it stands for all policies of a run, or for its only one."""

    name: str = ""
    weights: int = 0  # index of its set of weights
    adapter: int | None = None  # index of its adapter, if that set has several
    base: str | None = None  # model that the set begins as; None: that of the run
    trains: bool = True  # False: only the warm-up trains it
    is_fixed: bool = False  # True: nothing trains or saves it

    @property
    def index(self) -> int:
        """Index of the policy in the settings, which its training sequences have."""
        return self.weights if self.adapter is None else self.adapter

    @property
    def suffix(self) -> str:
        """Ending of the names of its metrics."""
        return f"/policy={self.name}" if self.name else ""

    def has(self, call: Transition) -> bool:
        """Return True if the policy answered the call."""
        return self.name in ("", call.answered_by)

    def calls(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return all trajectories, reduced to the policy's calls."""
        return [keep_calls(trajectory, self.has) for trajectory in trajectories]

    def values(
        self, trajectories: Sequence[Trajectory], values: Sequence[Sequence[Item]]
    ) -> list[tuple[Item, ...]]:
        """Return the values of the calls that `calls` keeps, from those of all calls."""
        return [
            tuple(v for c, v in zip(trajectory.transitions, items, strict=True) if self.has(c))
            for trajectory, items in zip(trajectories, values, strict=True)
        ]


ALL = Policy()


@dataclass(frozen=True)
class PolicyTable:
    """Rows for the policies in the settings, in order, or one row for a run without a section.

    Fixed rows follow.
    """

    rows: tuple[Policy, ...] = (ALL,)

    @classmethod
    def of(
        cls, policies: Mapping[str, PolicyConfig], *, are_adapters: bool = False
    ) -> "PolicyTable":
        """Return the table of these policies: adapters in one set of weights, or a set each."""

        def rows() -> Iterator[Policy]:
            for index, (name, policy) in enumerate(policies.items()):
                weights, adapter = (0, index) if are_adapters else (index, None)
                yield Policy(name, weights, adapter, policy.base, policy.trains)

        return cls(tuple(rows()) or (ALL,))

    def with_fixed(self, name: str, base: str | None = None) -> "PolicyTable":
        """Return the table with one more row, whose weights stay those of `base`."""
        last, adapter = self.rows[-1], self.rows[0].adapter
        row = Policy(name, last.weights + 1, adapter, base, trains=False, is_fixed=True)
        return replace(self, rows=(*self.rows, row))

    @cached_property
    def named(self) -> dict[str, Policy]:
        """Policies of the settings by name; empty if there is only one."""
        return {row.name: row for row in self.rows if row.name and not row.is_fixed}

    def row(self, name: str) -> Policy | None:
        """Return the row of this name, or None if there is none."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def sets(self) -> tuple[Policy, ...]:
        """Policies with a set of weights of their own, in order, or `ALL` if they share one."""
        return (ALL,) if self.adapters else tuple(self.named.values()) or (ALL,)

    @property
    def adapters(self) -> dict[str, int]:
        """Index of each policy's adapter; empty unless several policies share weights."""
        rows = self.named.values()
        return {row.name: row.adapter for row in rows if row.adapter is not None}

    @property
    def num_adapters(self) -> int | None:
        """Number of adapters stacked in each kernel, or None if adapters are not stacked."""
        return len(self.adapters) or None

    @property
    def indices(self) -> dict[str, int]:
        """Index of each policy in the settings; empty if there is only one."""
        return {name: row.index for name, row in self.named.items()}


SINGLE = PolicyTable()  # of a run of one policy
