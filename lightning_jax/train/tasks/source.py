"""Source of the groups that policy steps train on, and the choice of those that a step takes."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.rollouts.rewards.scoring import RewardScorer
from lightning_jax.rollouts.runner import group_id
from lightning_jax.traces.store import Store
from lightning_jax.types import Metrics, Rollout, Task

log = logging.getLogger(__name__)

Key = tuple[int, int]  # (step, index)


@dataclass(frozen=True, eq=False)
class Group:
    """Group of rollouts that has begun. Its age counts from the weights of `version`.

    They are those of its beginning or, for a group from outside, of its newest call.
    """

    key: Key
    version: int
    task: Task
    running: tuple[asyncio.Future[Rollout], ...] = ()
    scoring: asyncio.Task[list[Rollout]] | None = None  # by the run's `rewards`, if it has any

    @property
    def group_id(self) -> str:
        return group_id("train", *self.key)

    @property
    def is_complete(self) -> bool:
        if self.scoring is not None:
            return self.scoring.done()
        return all(rollout.done() for rollout in self.running)

    @property
    def rollouts(self) -> list[Rollout]:
        """Rollouts of a complete group. Raises the error that kept one from its end."""
        if self.scoring is not None:
            return self.scoring.result()
        return [rollout.result() for rollout in self.running]


def completed(rollouts: Iterable[Rollout]) -> tuple[asyncio.Future[Rollout], ...]:
    """Return futures that have these results, for a group whose rollouts have ended."""
    futures = []
    for rollout in rollouts:
        futures.append(asyncio.get_running_loop().create_future())
        futures[-1].set_result(rollout)
    return tuple(futures)


@dataclass(eq=False)
class OpenGroup:
    """Group that still takes rollouts, or whose rollouts still run."""

    key: Key
    name: str | None
    task: Task
    size: int
    finished: dict[int, Rollout] = field(default_factory=dict)  # by index
    free: list[tuple[int, int]] = field(default_factory=list)  # index and attempt, to try again
    num_begun: int = 0  # indices in use
    version: int = field(init=False)  # of the newest call of a finished rollout
    digest: str = field(init=False)  # of the task

    def __post_init__(self) -> None:
        self.version = self.key[0]
        self.digest = task_digest(self.task)

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.size

    @property
    def is_running(self) -> bool:
        """True if a rollout runs, so that new calls may come."""
        return self.num_begun > len(self.finished) + len(self.free)

    def take_place(self) -> tuple[int, int] | None:
        """Return the index and attempt of the next rollout, or None if there is no place."""
        if self.free:
            return self.free.pop(0)
        if self.num_begun == self.size:
            return None
        self.num_begun += 1
        return self.num_begun - 1, 1

    def finish(self, rollout: Rollout, version: int) -> None:
        """Add a finished rollout. `version` is that of its newest call."""
        self.finished[rollout.index] = rollout
        self.version = max(self.version, version)

    def give_up(self, index: int, attempt: int) -> None:
        """Free the place of an attempt without a result."""
        self.free.append((index, attempt + 1))


def task_digest(task: Task) -> str:
    """Return a digest of the task as JSON, in which the store keeps it."""
    text = json.dumps(task, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


class Source:
    """Source of the groups that the policy steps of a run train on.

    The run asks it for the groups of each step in turn. `Groups` samples them, `ExternalGroups`
    lets programs outside open them, and `StoredGroups` reads them from another run.

    `rollout.source: FILE:CLASS` names a subclass of yours, most easily of `Groups`. It is made with
    the arguments of `Groups`: the settings, the tasks (`Pipelines`), the runner of the agent, and a
    function to call after each rollout.
    """

    store: Store  # with the spans of the rollouts

    async def take(self, step: int, number: int) -> list[Group]:
        """Wait until the step can take this many complete groups, and return them.

        A step takes more than once if `algorithm.max_sampling_rounds` is above 1. A step that is
        repeated after a crash must take the same groups again; `StepGroups` keeps them.
        """
        raise NotImplementedError

    @property
    def num_finished(self) -> int:
        """Number of finished rollouts of groups that no step has taken, for the progress bar."""
        return 0

    def take_metrics(self) -> Metrics:
        """Return counts of what was not trained on since the last call."""
        return {}

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep, as a JSON object with names of its own."""
        return {}

    def restore(self, progress: Mapping[str, Any] | None) -> None:
        """Continue at what `progress` of a checkpoint says. Without it, stay at the beginning."""

    async def close(self) -> None:
        """Cancel what runs, and wait for its end."""


Choose = Callable[[Sequence[Group], int], list[Group] | None]  # (untaken, number) -> chosen


class StepGroups:
    """Choice of the groups that the present step takes.

    The store keeps it, so that a step that is repeated after a crash takes the same groups.
    """

    def __init__(self, store: Store, choose: Choose) -> None:
        """`choose` returns the groups that a step takes for the first time."""
        self._store, self._choose = store, choose
        self.step = -1
        self._taken: list[str] = []  # ids of the present step's groups
        self._recorded: list[str] = []  # ids that this step had taken before a crash

    async def begin(self, step: int) -> None:
        """Go to a step, unless it is the present one."""
        if step != self.step:
            self._recorded = await self._store.in_order(self._store.step_groups, step)
            self.step, self._taken = step, []

    def choose(self, groups: Sequence[Group], number: int) -> list[Group] | None:
        """Return the groups to take, or None if the step has to wait.

        `groups` have not been taken and are in order.
        """
        if again := self._recorded[:number]:
            chosen = [group for group in groups if group.group_id in again]
            if len(chosen) < number:  # settings changed, so that fewer run or more are wanted
                log.info("step %d: not all of the groups that it had taken run again", self.step)
                self._recorded = []
            elif not all(group.is_complete for group in chosen):
                return None
            else:
                self._recorded = self._recorded[number:]
                return chosen
        return self._choose(groups, number)

    async def record(self, chosen: Sequence[Group]) -> None:
        """Record that the present step takes these groups."""
        self._taken += [group.group_id for group in chosen]
        await self._store.in_order(self._store.set_step_groups, self.step, self._taken)


def oldest_complete(
    groups: Sequence[Group], number: int, *, step: int, per_step: int, max_staleness: int
) -> list[Group] | None:
    """Return the oldest complete groups, or None if the step has to wait.

    `groups` are in order. A group that began with version v must be trained by step
    v + max_staleness, and each step takes `per_step`. So if more are due by a later step than the
    steps in between can take, this step has to take the rest, and waits for them.
    """
    chosen = [group for group in groups if group.is_complete][:number]
    if len(chosen) < number:
        return None
    for last in {group.version + max_staleness for group in groups}:
        due = [group for group in groups if group.version + max_staleness <= last]
        least = len(due) - per_step * max(last - step, 0)
        if sum(group in chosen for group in due) < min(least, number):
            return None
    return chosen


def newest_complete(groups: Sequence[Group], number: int) -> list[Group] | None:
    """Return the groups that were complete last, or None if the step has to wait.

    `groups` are in the order in which they were complete. That order does not depend on how long
    their rollouts took, so long ones have the same share of the groups taken as of all.
    """
    complete = [group for group in groups if group.is_complete]
    return complete[len(complete) - number :] if len(complete) >= number else None


def start_scoring(
    scorer: RewardScorer | None,
    task: Task,
    running: Sequence[asyncio.Future[Rollout]],
    on_done: Callable[[], None],
) -> asyncio.Task[list[Rollout]] | None:
    """Start to score a group when its rollouts are done. Return None without `rewards`."""
    if scorer is None:
        return None

    async def score() -> list[Rollout]:
        return await scorer.score(task, await asyncio.gather(*running))

    scoring = asyncio.create_task(score())
    scoring.add_done_callback(lambda _: on_done())
    return scoring
