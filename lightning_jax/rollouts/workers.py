"""Rollouts in workers: processes that take them over HTTP, on this machine or others."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_jax.gateway.sessions.lease_report import LOST, SILENT, Report
from lightning_jax.gateway.sessions.leases import LeaseLost, LeaseQueue, WaitingWorker
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.leased_work import KINDS, LeasedWork, existing_paths
from lightning_jax.rollouts.outcome import (
    BAD_REWARD,
    SILENCES,
    Outcome,
    failure,
    kept_metrics,
    outcome_of,
)
from lightning_jax.traces.context import trace_headers
from lightning_jax.types import LLM, Task

log = logging.getLogger(__name__)

UNASKED_S = 30.0  # without a worker that asks, before waiting rollouts are worth a warning
WARNING_S = 600.0  # between two such warnings
MAX_SILENCES = 2  # workers that a task may silence before its agent has failed

# Runs the agent on a task for the rollout of this id.
Execute = Callable[[str, Task, LLM], Coroutine[Any, Any, Outcome]]


async def _is_heard(running: asyncio.Future[Any]) -> float:
    return 0.0


@dataclass(frozen=True)
class Execution:
    """Execution of the agent for one attempt, in this process unless the fields say otherwise.

    `worker` returns the name of its worker. `silent_s` waits until one knows whether the worker is
    silent, at most until the given future is done, and returns for how many seconds it was.
    """

    run: Execute
    worker: Callable[[], str | None] = lambda: None
    silent_s: Callable[[asyncio.Future[Any]], Awaitable[float]] = _is_heard


class Workers:
    """Workers that run the agent of one run.

    `hint` tells how to start one, and is added to the warning that none asks for work.

    An agent that holds its interpreter silences its worker with all rollouts there. Each of these
    is tried again where nothing else runs, so that it loses no further attempt to another one, and
    the agent that silences a second worker is known.
    """

    def __init__(self, queue: LeaseQueue, hint: str = "") -> None:
        self._queue, self._hint = queue, hint
        self._num_waiting = 0
        self._warned_s = -WARNING_S
        self._num_silences = Counter[str]()  # by task
        self._silencing: set[str] = set()  # tasks that silenced a worker without others

    @property
    def num_workers(self) -> int:
        """Number of workers that have a rollout or ask for one."""
        return self._queue.num_workers

    @asynccontextmanager
    async def reserve(
        self, config: RolloutConfig, task: Task, reasons: Sequence[str | None] = ()
    ) -> AsyncIterator[Execution]:
        """Wait for a worker that asks for work. Yield the execution of the agent there.

        `reasons` are those of the rollout's attempts that failed. Raises UserError if the workers
        of this machine cannot run the agent.
        """
        is_suspect = SILENT in reasons or reasons.count(LOST) > 1
        alone = is_suspect or str(task["id"]) in self._silencing
        async with AsyncExitStack() as at_end:
            with self._warning():
                worker = await at_end.enter_async_context(self._queue.worker(alone=alone))
            running = partial(self._run, worker, config, alone)
            yield Execution(running, lambda: worker.name, worker.silent_s)

    async def _run(
        self,
        worker: WaitingWorker,
        config: RolloutConfig,
        alone: bool,
        rollout_id: str,
        task: Task,
        llm: LLM,
    ) -> Outcome:
        work = LeasedWork(
            rollout_id,
            task,
            llm,
            max_abs_reward=config.max_abs_reward,
            max_metrics=config.max_metrics,
            traceparent=trace_headers().get("TRACEPARENT"),
            paths=existing_paths(task),
        )
        try:
            return outcome_of_report(await worker.run(work.to_json()), config)
        except LeaseLost as lost:
            if lost.is_silent and self._is_guilty(str(task["id"]), alone=alone):
                detail = f"{lost}; nothing else ran there, and the task had silenced another"
                return failure(SILENCES, detail)
            return Outcome("infrastructure_failure", reason=lost.reason, detail=str(lost))

    def _is_guilty(self, task_id: str, *, alone: bool) -> bool:
        """Note that a worker fell silent with the task. Return True if its agent has failed."""
        self._num_silences[task_id] += 1
        if not alone or self._num_silences[task_id] < MAX_SILENCES:
            return False
        self._silencing.add(task_id)
        return True

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Warn while this context is open and no worker asks for work."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            nonlocal timer
            self._warn(loop.time())
            timer = loop.call_later(UNASKED_S, look)

        timer = loop.call_later(UNASKED_S, look)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            timer.cancel()

    def _warn(self, now_s: float) -> None:
        if self._queue.unasked_s < UNASKED_S or now_s < self._warned_s + WARNING_S:
            return
        self._warned_s = now_s
        number = self._queue.num_workers
        log.warning(
            "%d rollouts wait, and no worker has asked for one for %.0f s; %s",
            *(self._num_waiting, self._queue.unasked_s),
            f"{number} workers are busy" if number else self._hint or "none is there",
            extra={"event": "no_worker", "number": number},
        )


def outcome_of_report(report: Report, config: RolloutConfig) -> Outcome:
    """Return the outcome that a worker reports, with the limits of this run."""
    if report.reward is not None:
        checked = outcome_of(report.reward, config)
        if checked.reason == BAD_REWARD:
            return checked
    metrics = kept_metrics(report.metrics or {}, config.max_metrics)
    kind = KINDS[report.kind]
    return kind(report.status, report.reward, report.reason, report.detail, metrics)
