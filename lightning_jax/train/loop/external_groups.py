"""Training groups whose rollouts programs outside open, such as a product in use.

A group has the attempts at one task. Ids derive from the step in which it was opened and a running
number. The store keeps all groups, so a run that was killed trains on each finished rollout.

A rollout may last for many steps. Its calls age one by one, as those of any other rollout: stale
ones are not trained on (`rl.staleness`). A group is too old once that holds for all of its calls.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from lightning_jax.errors import brief
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.sessions.work_messages import EXPIRED, EndFields, OpenFields
from lightning_jax.rl.token_weights import newest_version
from lightning_jax.rollouts.runner import RolloutRequest, Runner, group_id
from lightning_jax.rollouts.workers.external import HUNG_UP, ExternalAgents
from lightning_jax.rollouts.workers.pool import Execution
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.config import Config
from lightning_jax.train.tasks.source import (
    Group,
    OpenGroup,
    Source,
    StepGroups,
    completed,
    newest_complete,
    start_scoring,
    task_digest,
)
from lightning_jax.types import FINISHED, LLM, Metrics, Rollout, Task

log = logging.getLogger(__name__)

HINT_S = 30.0  # without a rollout, before the run says how to open one
RETRY_AFTER_S = 5
MANY_GROUPS = 100  # open ones, from which on incomplete ones are worth a warning
COUNTED = ("unfinished", "expired", "groups_too_old", "groups_incomplete")


class ExternalGroups(Source):
    """Groups that no step has taken yet, filled from outside.

    Rollouts join a group by its name and task, so callers that use one name for different tasks
    share no group. The store keeps everything, so a checkpoint keeps nothing.

    A step takes the groups that were complete last. One is dropped and counted if all calls of its
    finished rollouts are older than `algorithm.max_staleness` steps, and none of its rollouts runs.
    """

    def __init__(
        self,
        config: Config,
        runner: Runner,
        reader: TraceReader,
        tasks: Mapping[str, Task],
        on_rollout: Callable[[], None] = lambda: None,
    ) -> None:
        """`tasks` are those that callers may name by id."""
        self._config, self._runner, self._reader, self._tasks = config, runner, reader, tasks
        self.store, self._on_rollout = runner.store, on_rollout
        self._agents = ExternalAgents(config.rollout, config.agent.idle_s, runner.gateway)
        self._open: list[OpenGroup] = []  # in order of their keys
        self._complete: list[Group] = []  # the last one was complete last
        self._running: dict[str, asyncio.Task[None]] = {}  # by rollout id
        self._present = StepGroups(runner.store, newest_complete)
        self._next_index = 0
        self._is_ready = False  # once the first step has read the store
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._is_hinted = False
        self._num_to_warn = MANY_GROUPS
        self._counts = Counter[str]()
        self._num_taken = self._num_too_old = 0  # rollouts
        runner.gateway.work.outside = self

    # For programs outside

    async def open(self, fields: OpenFields) -> tuple[str, LLM]:
        """Open a rollout. Return its id and how to call the policy. Raise ApiError if refused.

        If cancelled, end it.
        """
        task, name = self._task_of(fields)
        if not self._is_ready:
            raise ApiError(
                503,
                "not_open",
                "the run takes no rollouts yet; try again in a moment.",
                retry_after_s=RETRY_AFTER_S,
            )
        await self._make_room()
        group, (index, attempt) = self._place(name, task)
        request = RolloutRequest(group.task, "train", *group.key, index)
        rollout_id = request.rollout(attempt).rollout_id
        opened: asyncio.Future[LLM] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(self._run(group, request, attempt, opened))
        self._running[rollout_id] = running
        running.add_done_callback(lambda _: self._running.pop(rollout_id))
        try:
            await asyncio.wait({running, opened}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not opened.cancel():
                self._agents.discard(rollout_id, HUNG_UP)
            raise
        if not opened.done():
            opened.cancel()
            raise self._error or ApiError(503, "draining", "the run is ending.")
        return rollout_id, opened.result()

    async def _make_room(self) -> None:
        """Give up an unused rollout if as many are open as may be. Raise ApiError if there is none.

        The answer to its caller, which asked again, may have been lost.
        """
        limit = self._config.rollout.concurrency
        while len(self._running) >= limit:
            if (unused := self._runner.gateway.work.expire_unused()) is None:
                raise ApiError(
                    429,
                    "too_many_rollouts",
                    f"{limit} rollouts are open, the limit of rollout.concurrency; end some.",
                    retry_after_s=RETRY_AFTER_S,
                )
            await asyncio.wait({self._running[unused]})

    async def end(self, rollout_id: str, fields: EndFields) -> Rollout:
        """End a rollout and return it as it is stored."""
        posted, scorer = self._runner.gateway.posted_reward(rollout_id), self._runner.scorer
        needs_reward = scorer is None or scorer.needs_agent_reward
        self._agents.end(rollout_id, fields, posted, needs_reward=needs_reward)
        await asyncio.wait({self._running[rollout_id]})
        return await self.store.in_order(self.store.rollout, rollout_id)

    # For the trainer

    async def take(self, step: int, number: int) -> list[Group]:
        """Wait until the step can take this many complete groups, and return them in order.

        A step that had taken groups before a crash takes the same ones again.
        """
        if step != self._present.step:
            await self._begin_step(step)
        hinting = asyncio.get_running_loop().call_later(HINT_S, self._hint)
        try:
            while (chosen := self._choose(number)) is None:
                self._changed.clear()
                await self._changed.wait()
        finally:
            hinting.cancel()
        chosen = sorted(chosen, key=lambda group: group.key)
        self._complete = [group for group in self._complete if group not in chosen]
        self._num_taken += sum(len(group.running) for group in chosen)
        await self._present.record(chosen)
        return chosen

    @property
    def num_finished(self) -> int:
        complete = sum(len(group.running) for group in self._complete)
        return complete + sum(len(group.finished) for group in self._open)

    def take_metrics(self) -> Metrics:
        metrics = {f"rollout/num_external_{name}": float(self._counts[name]) for name in COUNTED}
        of_both = max(self._num_taken + self._num_too_old, 1)
        metrics["rollout/external_too_old_share"] = self._num_too_old / of_both
        self._counts.clear()
        self._num_taken = self._num_too_old = 0
        return metrics

    async def close(self) -> None:
        """Refuse new rollouts, cancel those that run and their scoring, and wait for their end."""
        self._runner.gateway.work.outside = None
        scoring = [group.scoring for group in self._complete if group.scoring]
        running = [*self._running.values(), *scoring]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _task_of(self, fields: OpenFields) -> tuple[Task, str | None]:
        """Return the task and the name of its group. Raise ApiError if one is unusable."""
        if fields.task_id is not None:
            task = self._tasks.get(fields.task_id)
            if task is None:
                raise ApiError(
                    404,
                    "task_not_found",
                    f"no training task has the id {fields.task_id!r}; send the task itself as "
                    "task.",
                    param="task_id",
                )
            return task, fields.group or fields.task_id
        assert fields.task is not None, "the route has checked the fields"
        task = {name: v for name, v in fields.task.items() if name != "id" or v is not None}
        if not isinstance(task.get("id", ""), str):
            raise invalid("task.id is no string; send a string or none.", "task", "invalid_type")
        name = fields.group or task.get("id")
        if name is None and self._config.rollout.group_size > 1:
            raise invalid(
                "group is missing, and the task has no id; name the group, because the run "
                f"compares rollout.group_size={self._config.rollout.group_size} attempts at a "
                "task.",
                "group",
                reason="missing",
            )
        return task, name

    def _place(self, name: str | None, task: Task) -> tuple[OpenGroup, tuple[int, int]]:
        """Return a group with the name and a place in it. A new group has this task."""
        key = (self._present.step, self._next_index)
        task = {"id": name or f"external-{key[0]}-{key[1]}"} | task
        if name is not None:
            digest = task_digest(task)
            for group in self._open:
                is_same = group.name == name and group.digest == digest
                if is_same and (place := group.take_place()):
                    return group, place
        self._next_index += 1
        group = OpenGroup(key, name, task, self._config.rollout.group_size)
        self._warn_of_incomplete()
        self._open.append(group)
        place = group.take_place()
        assert place is not None, "a new group has a place"
        return group, place

    def _warn_of_incomplete(self) -> None:
        """Warn if many groups wait for attempts that nobody makes, and again if twice as many."""
        if len(self._open) < self._num_to_warn:
            return
        self._num_to_warn *= 2
        idle_groups = [group for group in self._open if not group.is_running]
        if 2 * len(idle_groups) >= len(self._open):
            log.warning(
                "%d groups have fewer than rollout.group_size=%d attempts and none is running, "
                "such as %s; a step takes only complete ones, so open that many rollouts for each "
                "task, with the same group and an equal task",
                *(len(idle_groups), self._config.rollout.group_size, brief(idle_groups[0].name)),
                extra={"event": "groups_incomplete", "number": len(idle_groups)},
            )

    async def _run(
        self,
        group: OpenGroup,
        request: RolloutRequest,
        attempt: int,
        opened: asyncio.Future[LLM],
    ) -> None:
        """Run one rollout from outside, up to its end."""
        store = self.store
        try:
            if (request.index, attempt) == (0, 1):
                await store.in_order(
                    store.add_external_group,
                    *(request.group_id, request.step, group.name, group.task),
                )
            execution = Execution(partial(self._agents.run, opened))
            rollout = await self._runner.run_once(request, attempt, execution, draw=attempt)
            await self._finish(group, rollout)
        except Exception as error:  # noqa: BLE001  (of our code: `take` raises it)
            self._error = error
        finally:
            self._changed.set()

    async def _finish(self, group: OpenGroup, rollout: Rollout) -> None:
        if rollout.status not in FINISHED:
            log.warning("%s: %s: %s", rollout.rollout_id, rollout.reason, rollout.detail)
            self._counts["expired" if rollout.reason == EXPIRED else "unfinished"] += 1
            group.give_up(rollout.index, rollout.attempt)
            return
        group.finish(rollout, await self._version_of(rollout, self._present.step))
        self._on_rollout()
        if group.is_complete:
            self._complete_group(group)
            await self._drop_too_old()

    async def _version_of(self, rollout: Rollout, step: int) -> int:
        """Return the version of the rollout's newest call, or the step if it has none."""

        def read() -> int | None:
            spans = self.store.spans(rollout.rollout_id)
            return newest_version(self._reader.transitions(spans)[0])

        version = await run_in_thread(read)
        return step if version is None else version

    def _complete_group(self, group: OpenGroup) -> None:
        """Move a group to the complete ones, and start to score it."""
        self._open.remove(group)
        running = completed(group.finished[index] for index in range(len(group.finished)))
        complete = Group(group.key, group.version, group.task, running)
        scoring = start_scoring(self._runner.scorer, group.task, running, self._changed.set)
        self._complete.append(replace(complete, scoring=scoring))

    async def _begin_step(self, step: int) -> None:
        """Go to a step: read its stored groups, and drop groups that are too old."""
        next_index = await self._restore(step if self._is_ready else 0, step)
        await self._present.begin(step)
        self._next_index = next_index
        await self._drop_too_old()
        if not self._is_ready:
            self._is_ready = True
            url = self._runner.gateway.url
            log.info("open rollouts with POST %s/v1/rollouts and the key serve.api_key", url)

    async def _drop_too_old(self) -> None:
        """Drop groups from which nothing can be learned any more, and count them."""
        oldest = self._present.step - self._config.algorithm.max_staleness
        complete = [group for group in self._complete if group.version < oldest]
        incomplete = [g for g in self._open if g.version < oldest and not g.is_running]
        self._complete = [group for group in self._complete if group not in complete]
        self._open = [group for group in self._open if group not in incomplete]
        for group in complete:
            if group.scoring is not None:
                group.scoring.cancel()
        self._num_too_old += sum(len(group.running) for group in complete)
        self._num_too_old += sum(len(group.finished) for group in incomplete)
        self._counts["groups_too_old"] += len(complete) + len(incomplete)
        self._counts["groups_incomplete"] += len(incomplete)
        if group_ids := [group_id("train", *group.key) for group in (*complete, *incomplete)]:
            store = self.store
            await store.in_order(store.drop_external_groups, self._present.step, group_ids)

    async def _restore(self, first: int, step: int) -> int:
        """Read the groups that an earlier process opened since step `first` and no step has taken.

        Return the number of those of `step`.
        """
        store = self.store
        stored_groups = await store.in_order(store.external_groups, first, step)
        for stored in stored_groups:
            rollouts = await store.in_order(store.rollouts, group_id=stored.group_id)
            if any(rollout.superseded for rollout in rollouts):
                continue
            size = self._config.rollout.group_size
            group = OpenGroup((stored.step, stored.index), stored.name, stored.task, size)
            newest = {rollout.index: rollout for rollout in rollouts}  # attempts are in order
            group.num_begun = max(newest, default=-1) + 1
            for index in range(group.num_begun):
                rollout = newest.get(index)
                if rollout is not None and rollout.status in FINISHED:
                    group.finish(rollout, await self._version_of(rollout, step))
                else:  # a crash may have left a place without a rollout
                    group.give_up(index, rollout.attempt if rollout else 0)
            self._open.append(group)
            if group.is_complete:
                self._complete_group(group)
        if not self._is_ready:
            self._complete.sort(key=lambda group: (group.version, group.key))
        return sum(stored.step == step for stored in stored_groups)

    def _choose(self, number: int) -> list[Group] | None:
        """Return the groups to take, or None if the step has to wait."""
        if self._error is not None:
            raise self._error
        return self._present.choose(self._complete, number)

    def _hint(self) -> None:
        """Say once how rollouts are opened, if none is."""
        if not self._is_hinted and not self._running:
            self._is_hinted = True
            log.warning(
                "no rollout was opened for %g s; open one with POST %s/v1/rollouts and the key "
                "serve.api_key",
                HINT_S,
                self._runner.gateway.url,
                extra={"event": "no_external_rollouts"},
            )
