"""HTTP routes of work that others run.

Workers take leases, keep them and report, with the server's key:

POST /v1/leases/take        a `TakeFields` -> {"version", "lease_s", "lease": id, "work": ...}, or
                            a null lease
POST /v1/leases/heartbeat   a `HeartbeatFields` -> {"over": {id: why}}
POST /v1/leases/ID/report   a `Report`; 410 if the lease is over

Programs outside of a run open rollouts, with the server's key, and end them:

POST /v1/rollouts           an `OpenFields` -> {"rollout_id", "base_url", "api_key", "calls_url",
                            "calls_key", "model"}
POST base_url + /end        an `EndFields` -> {"rollout_id", "status", "reward", "reason"}
"""

import json
from collections.abc import Mapping
from typing import TypeVar

from aiohttp import web

from lightning_jax.errors import brief
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import Fields
from lightning_jax.gateway.http.auth import Callers
from lightning_jax.gateway.http.server import Bodies
from lightning_jax.gateway.sessions.leases import LeaseQueue
from lightning_jax.gateway.sessions.work_messages import (
    VERSION,
    EndFields,
    ExternalRollouts,
    HeartbeatFields,
    OpenFields,
    Report,
    TakeFields,
)

F = TypeVar("F", bound=Fields)


class WorkRoutes:
    """Routes to the open work of one gateway."""

    def __init__(self, callers: Callers, bodies: Bodies, work: LeaseQueue) -> None:
        self._callers, self._bodies, self._work = callers, bodies, work

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/leases/take", self._take)
        app.router.add_post("/v1/leases/heartbeat", self._beat)
        app.router.add_post("/v1/leases/{lease_id}/report", self._report)
        app.router.add_post("/v1/rollouts", self._open)
        for path in ("/end", "/v1/end"):
            app.router.add_post("/rollout/{rollout_url}" + path, self._end)

    async def _take(self, request: web.Request) -> web.Response:
        fields = await self._read_of_worker(request, TakeFields)
        if fields.version != VERSION:
            raise ApiError(
                409,
                "other_release",
                f"worker {brief(fields.worker)} speaks version {fields.version} of the lease "
                f"protocol and the run version {VERSION}; install the run's release of "
                "lightning_jax on the worker's machine.",
                key="version",
            )
        check_agent(fields.worker, fields.agent, self._work.agent or {})
        lease_id, work = await self._work.take(fields.worker) or (None, "null")
        head = {"version": VERSION, "lease_s": self._work.lease_s, "lease": lease_id}
        text = f'{json.dumps(head)[:-1]}, "work": {work}}}'
        return web.Response(text=text, content_type="application/json")

    async def _beat(self, request: web.Request) -> web.Response:
        fields = await self._read_of_worker(request, HeartbeatFields)
        return web.json_response({"over": self._work.beat(fields.leases)})

    async def _report(self, request: web.Request) -> web.Response:
        report = await self._read_of_worker(request, Report)
        lease_id = request.match_info["lease_id"]
        self._work.report(lease_id, report)
        return web.json_response({"lease": lease_id})

    async def _open(self, request: web.Request) -> web.Response:
        self._callers.check_owner(request)
        fields = await self._read(request, OpenFields)
        rollout_id, llm = await self._outside().open(fields)
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
        rollout = self._callers.rollout_of(request)  # again: it may have ended in the meantime
        assert rollout is not None, "the path holds a rollout"
        result = await self._outside().end(rollout.settings.rollout_id, fields)
        names = ("rollout_id", "status", "reward", "reason")
        return web.json_response({name: getattr(result, name) for name in names})

    async def _read_of_worker(self, request: web.Request, kind: type[F]) -> F:
        """Return the fields of a worker's body. Raise ApiError if there is no work for workers."""
        self._callers.check_owner(request)
        body = await self._bodies.read_json(request)
        if self._work.agent is None:
            raise ApiError(
                404,
                "no_queue",
                "this server has no work for workers; set agent.workers or agent.remote_workers "
                "in its run.",
            )
        return kind.read(body)

    async def _read(self, request: web.Request, kind: type[F]) -> F:
        return kind.read(await self._bodies.read_json(request))

    def _outside(self) -> ExternalRollouts:
        if self._work.outside is None:
            raise ApiError(
                404,
                "no_external_rollouts",
                "this server takes no rollouts from outside; set agent.external=true in its run.",
            )
        return self._work.outside


def check_agent(worker: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise ApiError if a worker has another agent than the run, with the setting that differs."""
    differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    if differing:
        raise ApiError(
            409,
            "wrong_agent",
            f"worker {brief(worker)} has another {', '.join(differing)} than the run; copy the "
            "run's agent and settings to its machine and start it again.",
            key=differing[0],
        )
