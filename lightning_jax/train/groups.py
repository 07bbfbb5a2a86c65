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
from lightning_jax.train.pipelines import Pipelines
from lightning_jax.train.step_groups import Group, Key, StepGroups, oldest_complete, start_scoring
from lightning_jax.types import Metrics, Rollout

GROUPS = "groups"  # in the progress of a checkpoint


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
        self._wanted = 0
        self._present = StepGroups(runner.store, self._oldest)
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

    @property
    def num_finished(self) -> int:
        """Number of finished rollouts of groups that no step has taken."""
        return sum(rollout.done() for group in self._untaken for rollout in group.running)

    def take_metrics(self) -> Metrics:
        """Return {}: each rollout that has begun is trained on or counted as failed."""
        return {}

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
        running: list[asyncio.Future[Any]] = []
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
            scoring = start_scoring(self._runner.scorer, group.task, running, self._changed.set)
            self._untaken.append(replace(group, running=running, scoring=scoring))
        self._untaken.sort(key=lambda group: group.key)

    def _oldest(self, groups: Sequence[Group], number: int) -> list[Group] | None:
        return oldest_complete(
            groups,
            number,
            step=self._present.step,
            per_step=self._per_step,
            max_staleness=self._config.algorithm.max_staleness,
        )

    def _room(self) -> int:
        """Return the number of groups that may begin."""
        num_later = (self._config.total_steps - 1 - self._present.step) * self._per_step
        ahead = min(self._config.rollout.ahead, num_later)
        return max(self._wanted + ahead - len(self._untaken), 0)

    def _new(self) -> Group:
        step, index = self._next
        # In lock step, groups that replace others are numbered on within their step.
        if self._config.rollout.ahead and index >= self._per_step:
            step, index = step + 1, 0
        self._next = (step, index + 1)
        return Group((step, index), self._present.step, self._pipelines.next_tasks(1)[0])

    def _start(self, group: Group) -> tuple[asyncio.Task[Rollout], ...]:
        step, index = group.key
        size = self._config.rollout.group_size
        requests = make_requests([group.task], "train", step, size, first_index=index)
        running = [asyncio.create_task(self._runner.run_in_turn(request)) for request in requests]
        for rollout in running:
            rollout.add_done_callback(self._done)
        return tuple(running)

    def _done(self, rollout: asyncio.Task[Rollout]) -> None:
        self._changed.set()
        if not rollout.cancelled() and rollout.exception() is None:
            self._on_rollout()

    @property
    def _per_step(self) -> int:
        return self._config.rollout.tasks_per_step


def untaken_ids(progress: Mapping[str, Any] | None) -> list[str]:
    """Return the ids of the groups in a checkpoint's progress that no step has taken."""
    saved = (progress or {}).get(GROUPS, {})
    return [group_id("train", *begun["key"]) for begun in saved.get("untaken", ())]
