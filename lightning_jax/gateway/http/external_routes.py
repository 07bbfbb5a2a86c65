"""HTTP routes through which programs outside of a run open rollouts and end them.

POST /v1/rollouts          an `OpenFields` -> {"rollout_id", "base_url", "api_key", "calls_url",
                           "calls_key", "model"}, with the server's key
POST base_url + /end       an `EndFields` -> {"rollout_id", "status", "reward", "reason"}
"""

from typing import Any, Protocol, TypeVar, runtime_checkable

from aiohttp import web

from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.fields import Fields, FiniteNumber, Name, read
from lightning_jax.gateway.http.auth import Callers
from lightning_jax.gateway.http.server import Bodies
from lightning_jax.types import LLM, Rollout

F = TypeVar("F", bound=Fields)


class OpenFields(Fields):
    """Rollout to open, for a task of the caller or one of the run's training tasks."""

    task: dict[str, Any] | None = None
    task_id: Name | None = None
    group: Name | None = None  # rollouts of one group are attempts at one task

    def check(self) -> None:
        """Raise ApiError unless there is exactly one of `task` and `task_id`."""
        if (self.task is None) == (self.task_id is None):
            number = "neither" if self.task is None else "both"
            raise invalid(
                f"task and task_id: {number} is set; send one of them.", "task", reason="conflict"
            )


class EndFields(Fields):
    """End of a rollout: its reward, unless one was posted, or why there is none."""

    reward: FiniteNumber | None = None
    metrics: dict[str, Any] | None = None  # what is no finite number is dropped and counted
    error: Name | None = None  # how the agent failed
    discard: bool = False  # True: nothing is learned from the rollout

    def check(self) -> None:
        """Raise ApiError if a reward, an error and `discard` contradict each other."""
        if (self.reward is not None) + (self.error is not None) + self.discard > 1:
            raise invalid(
                "reward, error and discard are set together; send one of them.",
                "reward",
                reason="conflict",
            )


@runtime_checkable
class ExternalRollouts(Protocol):
    """Run that takes rollouts from outside."""

    async def open(self, fields: OpenFields) -> tuple[str, LLM]:
        """Return the id of a new rollout and how to call the policy. Raise ApiError if refused.

        If cancelled, because the caller hung up, end the rollout.
        """
        ...

    async def end(self, rollout_id: str, fields: EndFields) -> Rollout:
        """End an open rollout and return it. Raise ApiError if it is not from outside."""
        ...


class ExternalRoutes:
    """Routes of one gateway. Without `rollouts`, callers are sent away."""

    def __init__(self, callers: Callers, bodies: Bodies) -> None:
        self._callers, self._bodies = callers, bodies
        self.rollouts: ExternalRollouts | None = None

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/rollouts", self._open)
        for path in ("/end", "/v1/end"):
            app.router.add_post("/rollout/{rollout_url}" + path, self._end)

    async def _open(self, request: web.Request) -> web.Response:
        self._callers.check_owner(request)
        fields = await self._read(request, OpenFields)
        fields.check()
        rollout_id, llm = await self._found().open(fields)
        answer = {"rollout_id": rollout_id, "base_url": llm.base_url, "api_key": llm.api_key}
        answer |= {"calls_url": llm.calls_url, "calls_key": llm.calls_key, "model": llm.model}
        answer |= {"prompts": llm.prompts} if llm.prompts else {}
        return web.json_response(answer, status=201)

    async def _end(self, request: web.Request) -> web.Response:
        """End a rollout. As for its rewards, its URL is the only key needed."""
        if not self._callers.may_report(request):
            raise ApiError(
                403,
                "calls_alone",
                "this URL answers calls alone; end the rollout at its base_url.",
            )
        fields = await self._read(request, EndFields)
        fields.check()
        rollout = self._callers.rollout_of(request)  # again: it may have ended in the meantime
        assert rollout is not None, "the path holds a rollout"
        ended = await self._found().end(rollout.settings.rollout_id, fields)
        names = ("rollout_id", "status", "reward", "reason")
        return web.json_response({name: getattr(ended, name) for name in names})

    async def _read(self, request: web.Request, kind: type[F]) -> F:
        return read(kind, await self._bodies.read_json(request))

    def _found(self) -> ExternalRollouts:
        if self.rollouts is None:
            raise ApiError(
                404,
                "no_external_rollouts",
                "this server takes no rollouts from outside; set agent.external=true in its run.",
            )
        return self.rollouts
