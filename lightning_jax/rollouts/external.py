"""Agents outside of the run: programs that open a rollout over HTTP and report its end."""

import asyncio
import time
from collections.abc import Callable

from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.http.external_routes import EndFields
from lightning_jax.gateway.sessions.feedback import check_size
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.outcome import (
    MAX_DETAIL,
    NoReward,
    Outcome,
    failure,
    outcome_of,
    storable,
)
from lightning_jax.types import LLM, Task

UNUSED_S = 30.0  # without a request since it was opened: the answer may have been lost
HUNG_UP = "the program that opened it hung up before it had the answer"
REPORTED, DISCARDED, EXPIRED = "reported_error", "discarded", "expired"


class ExternalAgents:
    """Open rollouts whose agents run outside, until each is ended or expires.

    `idle_s` returns the seconds since an open rollout's last request. Use only in the event loop's
    thread.
    """

    def __init__(self, config: RolloutConfig, max_idle_s: float, idle_s: Callable[[str], float]):
        self._config, self._max_idle_s, self._idle_s = config, max_idle_s, idle_s
        self._ends: dict[str, asyncio.Future[Outcome]] = {}
        self._opened_s: dict[str, float] = {}  # when, in the order of opening

    async def run(
        self, opened: asyncio.Future[LLM], rollout_id: str, task: Task, llm: LLM
    ) -> Outcome:
        """Resolve `opened` with `llm`, and return the outcome once the rollout ends or expires.

        If `opened` is cancelled, the rollout is discarded.
        A rollout that expires counts if a reward was posted for it.
        """
        ended = self._ends[rollout_id] = asyncio.get_running_loop().create_future()
        self._opened_s[rollout_id] = time.monotonic()
        try:
            if opened.cancelled():
                self.discard(rollout_id, HUNG_UP)
            else:
                opened.set_result(llm)
            while not ended.done():
                left = self._max_idle_s - self._idle_s(rollout_id)
                if left <= 0:
                    return NoReward(
                        "infrastructure_failure",
                        reason=EXPIRED,
                        detail=f"no request came for agent.idle_s={self._max_idle_s:g} s, and no "
                        "reward was posted",
                    )
                await asyncio.wait({ended}, timeout=left)
            return ended.result()
        finally:
            del self._ends[rollout_id], self._opened_s[rollout_id]

    def discard(self, rollout_id: str, why: str) -> None:
        """Let an open rollout end without an outcome to learn from."""
        if (ended := self._ends.get(rollout_id)) and not ended.done():
            ended.set_result(Outcome("infrastructure_failure", reason=DISCARDED, detail=why))

    def give_up_unused(self) -> str | None:
        """End the oldest rollout without a request since it was opened UNUSED_S ago or earlier.

        Return its id, or None if there is none.
        """
        now_s = time.monotonic()
        for rollout_id, opened_s in self._opened_s.items():
            age_s, ended = now_s - opened_s, self._ends[rollout_id]
            is_unused = self._idle_s(rollout_id) >= age_s >= UNUSED_S
            if is_unused and not ended.done():
                detail = f"no request came for {age_s:.0f} s, and another rollout was to be opened"
                ended.set_result(NoReward("infrastructure_failure", reason=EXPIRED, detail=detail))
                return rollout_id
        return None

    def end(
        self, rollout_id: str, fields: EndFields, posted: float | None, *, needs_reward: bool
    ) -> None:
        """Let an open rollout end. Raise ApiError if it is not from outside, or has no reward.

        `posted` is the reward that was posted for it. Without `needs_reward` it may have none.
        """
        ended = self._ends.get(rollout_id)
        if ended is None or ended.done():
            raise ApiError(
                404,
                "rollout_not_found",
                f"rollout {rollout_id!r} was not opened with POST /v1/rollouts, or it is ending; "
                "end each rollout once.",
                key=rollout_id,
            )
        ended.set_result(self._outcome(fields, posted, needs_reward=needs_reward))

    def _outcome(self, fields: EndFields, posted: float | None, *, needs_reward: bool) -> Outcome:
        if fields.discard:
            detail = "the program that opened it asked to learn nothing from it"
            return Outcome("infrastructure_failure", reason=DISCARDED, detail=detail)
        if fields.error is not None:
            return failure(REPORTED, storable(fields.error[:MAX_DETAIL]))
        reward = posted if fields.reward is None else fields.reward
        if reward is None and not needs_reward:
            return outcome_of(fields.metrics or {}, self._config)
        if reward is None:
            raise invalid(
                "reward is missing, and none was posted; send a reward, an error, or "
                '"discard": true.',
                "reward",
                reason="missing",
            )
        check_size("reward", reward, self._config.max_abs_reward)
        return outcome_of({**(fields.metrics or {}), "reward": reward}, self._config)
