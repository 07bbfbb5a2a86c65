"""Training groups of a run: started in order, and taken by a step once they are complete.

A group is all attempts at one task. Its ids and seeds derive from its key (step, index), which
follows from a running number. With `rollout.ahead` above 0, groups of coming steps run while the
trainer works. A step takes the oldest complete groups, so that another step than the one in its key
may train a group.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.rollouts.runner import Runner, group_id, make_requests
from lightning_jax.train.config import Config
from lightning_jax.train.tasks.pipelines import Pipelines
from lightning_jax.train.tasks.source import (
    Group,
    Key,
    Source,
    StepGroups,
    oldest_complete,
    start_scoring,
)
from lightning_jax.types import Rollout

GROUPS = "groups"  # in the progress of a checkpoint


class Groups(Source):
    """Groups that no step has taken yet.

    A step wants some groups, and `rollout.ahead` more may have begun. A group begins only if it
    will be trained within `algorithm.max_staleness` steps, so none is sampled in vain. A subclass
    may override `choose`, `num_to_begin` and `new_group`.
    """

    def __init__(
        self,
        config: Config,
        pipelines: Pipelines,
        runner: Runner,
        on_rollout: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_rollout` is called after each rollout."""
        self.config, self.pipelines, self.runner = config, pipelines, runner
        self.store = runner.store
        self._on_rollout = on_rollout
        self._untaken: list[Group] = []  # begun, by key
        self._pending: list[Group] = []  # begun before the process started, and not yet again
        self._next: Key = (0, 0)
        self._wanted = 0
        self._present = StepGroups(runner.store, self.choose)
        self._changed = asyncio.Event()

    async def take(self, step: int, number: int) -> list[Group]:
        """Wait until the step can take this many complete groups, and return them in order.

        A step that had taken groups before a crash takes the same ones again.
        """
        await self._present.begin(step)
        self._next = max(self._next, (step, 0))
        self._wanted = number
        self._begin()
        while (chosen := self._present.choose(self._untaken, number)) is None:
            self._changed.clear()
            await self._changed.wait()
        self._untaken = [group for group in self._untaken if group not in chosen]
        self._wanted = 0
        await self._present.record(chosen)
        self._begin()
        return chosen

    def choose(self, groups: Sequence[Group], number: int) -> list[Group] | None:
        """Return the groups that the step trains on, or None if it has to wait.

        `groups` have begun, and no step has taken them. They are in order.
        """
        return oldest_complete(
            groups,
            number,
            step=self.step,
            per_step=self.config.rollout.tasks_per_step,
            max_staleness=self.config.algorithm.max_staleness,
        )

    def num_to_begin(self) -> int:
        """Return the number of groups that may begin now."""
        num_later = self.config.total_steps - 1 - self.step
        num_later *= self.config.rollout.tasks_per_step
        ahead = min(self.config.rollout.ahead, num_later)
        return max(self._wanted + ahead - len(self._untaken), 0)

    def new_group(self) -> Group:
        """Return the next group, which has not begun."""
        step, index = self._next
        # In lock step, groups that replace others are numbered on within their step.
        if self.config.rollout.ahead and index >= self.config.rollout.tasks_per_step:
            step, index = step + 1, 0
        self._next = (step, index + 1)
        return Group((step, index), self.step, self.pipelines.next_tasks(1)[0])

    @property
    def step(self) -> int:
        """Step that takes groups, or took them last."""
        return self._present.step

    @property
    def num_finished(self) -> int:
        return sum(rollout.done() for group in self._untaken for rollout in group.running)

    def progress(self) -> dict[str, Any]:
        """Return the groups that no step has taken, and the next key, as a JSON object."""
        untaken = [
            {"key": list(group.key), "version": group.version, "task": group.task}
            for group in [*self._untaken, *self._pending]
        ]
        return {GROUPS: {"next": list(self._next), "untaken": untaken}}

    def restore(self, progress: Mapping[str, Any] | None) -> None:
        saved = (progress or {}).get(GROUPS)
        if saved is None:  # a new run, or one from before groups were saved
            return
        step, index = saved["next"]
        self._next = (step, index)
        for begun in saved["untaken"]:
            (step, index), task = begun["key"], self.pipelines.as_now(begun["task"])
            self._pending.append(Group((step, index), begun["version"], task))

    async def close(self) -> None:
        """Cancel the rollouts that run and their scoring, and wait for their end."""
        running: list[asyncio.Future[Any]] = []
        for group in self._untaken:
            running += [*group.running, *([group.scoring] if group.scoring else [])]
        for rollout in running:
            rollout.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _begin(self) -> None:
        """Begin as many groups as may run now."""
        for _ in range(self.num_to_begin()):
            group = self._pending.pop(0) if self._pending else self.new_group()
            running = self._start(group)
            scoring = start_scoring(self.runner.scorer, group.task, running, self._changed.set)
            self._untaken.append(replace(group, running=running, scoring=scoring))
        self._untaken.sort(key=lambda group: group.key)

    def _start(self, group: Group) -> tuple[asyncio.Task[Rollout], ...]:
        step, index = group.key
        size = self.config.rollout.group_size
        requests = make_requests([group.task], "train", step, size, first_index=index)
        running = [asyncio.create_task(self.runner.run_in_turn(request)) for request in requests]
        for rollout in running:
            rollout.add_done_callback(self._done)
        return tuple(running)

    def _done(self, rollout: asyncio.Task[Rollout]) -> None:
        self._changed.set()
        if not rollout.cancelled() and rollout.exception() is None:
            self._on_rollout()


def untaken_ids(progress: Mapping[str, Any] | None) -> list[str]:
    """Return the ids of the groups in a checkpoint's progress that no step has taken."""
    saved = (progress or {}).get(GROUPS, {})
    return [group_id("train", *begun["key"]) for begun in saved.get("untaken", ())]
