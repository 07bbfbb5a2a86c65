"""HTTP routes through which workers take leases, keep them and report. They need the server's key.

POST /v1/leases/take        {"worker", "agent", "version"} -> {"version", "lease_s", "lease": id,
                            "work": ...}, or a null lease
POST /v1/leases/heartbeat   {"leases": [id, ...]} -> {"over": {id: why}}
POST /v1/leases/ID/report   a `Report`; 410 if the lease is over
"""

import json
from typing import Annotated, TypeVar

from aiohttp import web
from pydantic import Field

from lightning_jax.errors import brief
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import Fields, Integer, Listed, read
from lightning_jax.gateway.http.auth import Callers
from lightning_jax.gateway.http.server import Bodies
from lightning_jax.gateway.sessions.lease_protocol import VERSION
from lightning_jax.gateway.sessions.lease_report import Report
from lightning_jax.gateway.sessions.leases import LeaseQueue

F = TypeVar("F", bound=Fields)


# Shown in logs, so without control characters.
WorkerName = Annotated[
    str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")
]


class TakeFields(Fields):
    worker: WorkerName
    agent: dict[str, str]  # a digest of each setting of the worker's agent
    version: Integer = 0  # of the protocol; workers before version 1 do not say theirs


class HeartbeatFields(Fields):
    leases: Listed[str]


class LeaseRoutes:
    """Routes of one gateway. Without a queue, workers are sent away."""

    def __init__(self, callers: Callers, bodies: Bodies) -> None:
        self._callers, self._bodies = callers, bodies
        self.queue: LeaseQueue | None = None

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/leases/take", self._take)
        app.router.add_post("/v1/leases/heartbeat", self._beat)
        app.router.add_post("/v1/leases/{lease_id}/report", self._report)

    async def _take(self, request: web.Request) -> web.Response:
        queue, fields = await self._read(request, TakeFields)
        if fields.version != VERSION:
            raise ApiError(
                409,
                "other_release",
                f"worker {brief(fields.worker)} speaks version {fields.version} of the lease "
                f"protocol and the run version {VERSION}; install the run's release of "
                "lightning_jax on the worker's machine.",
                key="version",
            )
        check_agent(fields.worker, fields.agent, queue.agent)
        lease_id, work = await queue.take(fields.worker) or (None, "null")
        head = {"version": VERSION, "lease_s": queue.lease_s, "lease": lease_id}
        text = f'{json.dumps(head)[:-1]}, "work": {work}}}'
        return web.Response(text=text, content_type="application/json")

    async def _beat(self, request: web.Request) -> web.Response:
        queue, fields = await self._read(request, HeartbeatFields)
        return web.json_response({"over": queue.beat(fields.leases)})

    async def _report(self, request: web.Request) -> web.Response:
        queue, report = await self._read(request, Report)
        report.check()
        lease_id = request.match_info["lease_id"]
        queue.report(lease_id, report)
        return web.json_response({"lease": lease_id})

    async def _read(self, request: web.Request, kind: type[F]) -> tuple[LeaseQueue, F]:
        """Return the queue and the fields of the body. Raise ApiError if the caller may not."""
        self._callers.check_owner(request)
        body = await self._bodies.read_json(request)
        if self.queue is None:
            raise ApiError(
                404,
                "no_queue",
                "this server has no work for workers; set agent.workers or agent.remote_workers "
                "in its run.",
            )
        return self.queue, read(kind, body)


def check_agent(worker: str, theirs: dict[str, str], ours: dict[str, str]) -> None:
    """Raise ApiError if a worker has another agent than the run, with the setting that differs."""
    differing = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    if differing:
        raise ApiError(
            409,
            "wrong_agent",
            f"worker {brief(worker)} has another {', '.join(differing)} than the run; copy the "
            "run's agent and settings to its machine and start it again.",
            key=differing[0],
        )
