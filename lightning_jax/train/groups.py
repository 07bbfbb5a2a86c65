"""Training groups of a run: started in order, and taken by a step once they are complete.

A group is all attempts at one task. Its ids and seeds derive from its key (step, index), which
follows from a running number. With `rollout.ahead` above 0, groups of coming steps run while the
trainer works. A step takes the oldest complete groups, so that another step than the one in its key
may train a group.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_jax.rollouts.runner import Runner, group_id, make_requests
from lightning_jax.train.config import Config
from lightning_jax.train.pipelines import Pipelines
from lightning_jax.types import Rollout, Task

log = logging.getLogger(__name__)

Key = tuple[int, int]  # (step, index)
GROUPS = "groups"  # in the progress of a checkpoint


@dataclass(frozen=True, eq=False)
class Group:
    """Group of rollouts that has begun. `version` is the weights version at that time."""

    key: Key
    version: int
    task: Task
    running: tuple[asyncio.Task[Rollout], ...] = ()
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


class Groups:
    """Groups that no step has taken yet.

    A step wants some groups, and `rollout.ahead` more may have begun. A group begins only if it
    will be trained within `algorithm.max_staleness` steps, so none is sampled in vain.
    """

    def __init__(
        self,
        config: Config,
        pipelines: Pipelines,
        runner: Runner,
        on_rollout: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_rollout` is called after each rollout."""
        self._config, self._pipelines, self._runner = config, pipelines, runner
        self._on_rollout = on_rollout
        self._untaken: list[Group] = []  # begun, by key
        self._pending: list[Group] = []  # begun before the process started, and not yet again
        self._next: Key = (0, 0)
        self._step, self._wanted = -1, 0
        self._taken: list[str] = []  # ids of the present step's groups
        self._recorded: list[str] = []  # ids that this step had taken before a crash
        self._changed = asyncio.Event()

    async def take(self, step: int, number: int) -> list[Group]:
        """Wait until the step can take this many complete groups, and return them in order.

        A step that had taken groups before a crash takes the same ones again.
        """
        store = self._runner.store
        if step != self._step:
            self._step, self._taken = step, []
            self._recorded = await store.in_order(store.step_groups, step)
        self._next = max(self._next, (step, 0))
        self._wanted = number
        self._begin()
        while (chosen := self._choose(number)) is None:
            self._changed.clear()
            await self._changed.wait()
        self._untaken = [group for group in self._untaken if group not in chosen]
        self._wanted = 0
        self._taken += [group.group_id for group in chosen]
        await store.in_order(store.set_step_groups, step, self._taken)
        self._begin()
        return chosen

    @property
    def num_finished(self) -> int:
        """Number of finished rollouts of groups that no step has taken."""
        return sum(rollout.done() for group in self._untaken for rollout in group.running)

    def progress(self) -> dict[str, Any]:
        """Return the groups that no step has taken, and the next key, as a JSON object."""
        untaken = [
            {"key": list(group.key), "version": group.version, "task": group.task}
            for group in [*self._untaken, *self._pending]
        ]
        return {GROUPS: {"next": list(self._next), "untaken": untaken}}

    def restore(self, progress: Mapping[str, Any] | None) -> None:
        """Continue at what `progress` of a checkpoint says. Without it, stay at the beginning."""
        saved = (progress or {}).get(GROUPS)
        if saved is None:  # a new run, or one from before groups were saved
            return
        step, index = saved["next"]
        self._next = (step, index)
        for begun in saved["untaken"]:
            (step, index), task = begun["key"], self._pipelines.as_now(begun["task"])
            self._pending.append(Group((step, index), begun["version"], task))

    async def close(self) -> None:
        """Cancel the rollouts that run and their scoring, and wait for their end."""
        running: list[asyncio.Task[Any]] = []
        for group in self._untaken:
            running += [*group.running, *([group.scoring] if group.scoring else [])]
        for rollout in running:
            rollout.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _begin(self) -> None:
        """Begin as many groups as may run now."""
        for _ in range(self._room()):
            group = self._pending.pop(0) if self._pending else self._new()
            running = self._start(group)
            scoring = self._start_scoring(group.task, running)
            self._untaken.append(replace(group, running=running, scoring=scoring))
        self._untaken.sort(key=lambda group: group.key)

    def _room(self) -> int:
        """Return the number of groups that may begin."""
        num_later = (self._config.total_steps - 1 - self._step) * self._per_step
        ahead = min(self._config.rollout.ahead, num_later)
        return max(self._wanted + ahead - len(self._untaken), 0)

    def _new(self) -> Group:
        step, index = self._next
        # In lock step, groups that replace others are numbered on within their step.
        if self._config.rollout.ahead and index >= self._per_step:
            step, index = step + 1, 0
        self._next = (step, index + 1)
        return Group((step, index), self._step, self._pipelines.next_tasks(1)[0])

    def _start(self, group: Group) -> tuple[asyncio.Task[Rollout], ...]:
        step, index = group.key
        size = self._config.rollout.group_size
        requests = make_requests([group.task], "train", step, size, first_index=index)
        running = [asyncio.create_task(self._runner.run_in_turn(request)) for request in requests]
        for rollout in running:
            rollout.add_done_callback(self._done)
        return tuple(running)

    def _start_scoring(
        self, task: Task, running: Sequence[asyncio.Task[Rollout]]
    ) -> asyncio.Task[list[Rollout]] | None:
        """Start to score a group when its rollouts are done. Return None without `rewards`."""
        scorer = self._runner.scorer
        if scorer is None:
            return None

        async def score() -> list[Rollout]:
            return await scorer.score(task, await asyncio.gather(*running))

        scoring = asyncio.create_task(score())
        scoring.add_done_callback(lambda _: self._changed.set())
        return scoring

    def _done(self, rollout: asyncio.Task[Rollout]) -> None:
        self._changed.set()
        if not rollout.cancelled() and rollout.exception() is None:
            self._on_rollout()

    @property
    def _per_step(self) -> int:
        return self._config.rollout.tasks_per_step

    def _choose(self, number: int) -> list[Group] | None:
        """Return the groups to take, or None if the step has to wait."""
        if again := self._recorded[:number]:
            chosen = [group for group in self._untaken if group.group_id in again]
            if len(chosen) < number:  # settings changed, so that fewer run or more are wanted
                log.info("step %d: not all of the groups that it had taken run again", self._step)
                self._recorded = []
            elif not all(group.is_complete for group in chosen):
                return None
            else:
                self._recorded = self._recorded[number:]
                return chosen
        return oldest_complete(
            self._untaken,
            number,
            step=self._step,
            per_step=self._per_step,
            max_staleness=self._config.algorithm.max_staleness,
        )


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


def untaken_ids(progress: Mapping[str, Any] | None) -> list[str]:
    """Return the ids of the groups in a checkpoint's progress that no step has taken."""
    saved = (progress or {}).get(GROUPS, {})
    return [group_id("train", *begun["key"]) for begun in saved.get("untaken", ())]
