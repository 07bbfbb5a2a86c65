"""Rollouts in workers: processes that take them over HTTP, on this machine or others."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from lightning_jax.gateway.leases import LeaseLost, LeaseQueue, Report
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.leased_work import KINDS, LeasedWork, existing_paths
from lightning_jax.rollouts.outcome import Outcome, kept_metrics
from lightning_jax.traces.context import trace_headers
from lightning_jax.types import LLM, Task

log = logging.getLogger(__name__)

HINT_S = 30.0  # without a worker before the run says how to start one

# Runs the agent on a task for the rollout of this id.
Execute = Callable[[str, Task, LLM], Coroutine[Any, Any, Outcome]]


class Workers:
    """Workers that run the agent of one run.

    `hint` tells how to start one, and is logged once if none comes. It is empty if the run starts
    them itself.
    """

    def __init__(self, queue: LeaseQueue, hint: str = "") -> None:
        self._queue, self._hint = queue, hint

    @asynccontextmanager
    async def reserve(self, config: RolloutConfig) -> AsyncIterator[Execute]:
        """Wait for a worker that asks for work. Yield the function that runs the agent there.

        Raises UserError if the workers of this machine cannot run the agent.
        """
        async with AsyncExitStack() as at_end:
            hinting = asyncio.get_running_loop().call_later(HINT_S, self._say)
            try:
                worker = await at_end.enter_async_context(self._queue.worker())
            finally:
                hinting.cancel()

            async def execute(rollout_id: str, task: Task, llm: LLM) -> Outcome:
                work = LeasedWork(
                    rollout_id,
                    task,
                    llm,
                    max_abs_reward=config.max_abs_reward,
                    max_metrics=config.max_metrics,
                    lease_s=self._queue.lease_s,
                    traceparent=trace_headers().get("TRACEPARENT"),
                    paths=existing_paths(task),
                )
                try:
                    return _outcome_of(await worker.run(work.to_json()), config)
                except LeaseLost as error:
                    return Outcome("infrastructure_failure", reason=error.reason, detail=str(error))

            yield execute

    def _say(self) -> None:
        if self._hint and not self._queue.num_workers:
            log.warning("%s", self._hint, extra={"event": "no_worker"})
            self._hint = ""


def _outcome_of(report: Report, config: RolloutConfig) -> Outcome:
    metrics = kept_metrics(report.metrics or {}, config.max_metrics)
    return KINDS[report.kind](report.status, report.reward, report.reason, report.detail, metrics)
