"""Agents outside of the run: programs that open a rollout over HTTP and report its end."""

import asyncio
from functools import partial

from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.sessions.feedback import check_size
from lightning_jax.gateway.sessions.work_messages import DISCARDED, REPORTED, EndFields, Report
from lightning_jax.rollouts.agents.outcome import MAX_DETAIL, Outcome, storable
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.workers.work import outcome_of_report
from lightning_jax.types import LLM, Task

HUNG_UP = "the program that opened it hung up before it had the answer"


class ExternalAgents:
    """Agents that run outside. Each rollout is a lease, until it is ended or expires."""

    def __init__(self, config: RolloutConfig, max_idle_s: float, gateway: Gateway):
        self._config, self._max_idle_s, self._gateway = config, max_idle_s, gateway

    async def run(
        self, opened: asyncio.Future[LLM], rollout_id: str, task: Task, llm: LLM
    ) -> Outcome:
        """Resolve `opened` with `llm`, and return the outcome once the rollout ends or expires.

        If `opened` is cancelled, the rollout is discarded.
        A rollout that expires counts if a reward was posted for it.
        """
        if opened.cancelled():
            report = _discarded(HUNG_UP)
        else:
            opened.set_result(llm)
            idle_s = partial(self._gateway.idle_s, rollout_id)
            report = await self._gateway.work.lease_outside(rollout_id, idle_s, self._max_idle_s)
        return outcome_of_report(report, self._config)

    def discard(self, rollout_id: str, why: str) -> None:
        """Let an open rollout end without an outcome to learn from."""
        if self._gateway.work.is_open(rollout_id):
            self._gateway.work.report(rollout_id, _discarded(why))

    def end(
        self, rollout_id: str, fields: EndFields, posted: float | None, *, needs_reward: bool
    ) -> None:
        """Let an open rollout end. Raise ApiError if it is not from outside, or has no reward.

        `posted` is the reward that was posted for it. Without `needs_reward` it may have none.
        """
        if not self._gateway.work.is_open(rollout_id):
            raise ApiError(
                404,
                "rollout_not_found",
                f"rollout {rollout_id!r} was not opened with POST /v1/rollouts, or it is ending; "
                "end each rollout once.",
                key=rollout_id,
            )
        reward = posted if fields.reward is None else fields.reward
        metrics = {name: v for name, v in (fields.metrics or {}).items() if name != "reward"}
        if fields.discard:
            report = _discarded("the program that opened it asked to learn nothing from it")
        elif fields.error is not None:
            detail = storable(fields.error[:MAX_DETAIL])
            report = Report(status="agent_failure", reason=REPORTED, detail=detail)
        elif reward is not None:
            check_size("reward", reward, self._config.max_abs_reward)
            report = Report(status="scored", reward=reward, metrics=metrics)
        elif needs_reward:
            raise invalid(
                "reward is missing, and none was posted; send a reward, an error, or "
                '"discard": true.',
                "reward",
                reason="missing",
            )
        else:
            report = Report(
                kind="no_reward", status="agent_failure", reason="no_reward", metrics=metrics
            )
        self._gateway.work.report(rollout_id, report)


def _discarded(why: str) -> Report:
    return Report(status="infrastructure_failure", reason=DISCARDED, detail=why)
