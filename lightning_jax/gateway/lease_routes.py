"""HTTP routes through which workers take leases, keep them and report. They need the server's key.

POST /v1/leases/take        {"worker", "agent"} -> {"lease": id, "work": ...}, or a null lease
POST /v1/leases/heartbeat   {"leases": [id, ...]} -> {"over": {id: why}}
POST /v1/leases/ID/report   a `Report`; 410 if the lease is over
"""

from typing import TypeVar

from aiohttp import web

from lightning_jax.gateway.auth import Callers
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import Fields, Listed, Name, brief, read
from lightning_jax.gateway.http import Bodies
from lightning_jax.gateway.leases import LeaseQueue, Report

F = TypeVar("F", bound=Fields)


class TakeFields(Fields):
    worker: Name
    agent: dict[str, str]  # a digest of each setting of the worker's agent


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
        check_agent(fields.worker, fields.agent, queue.agent)
        taken = await queue.take(fields.worker)
        if taken is None:
            return web.json_response({"lease": None})
        lease_id, work = taken
        text = f'{{"lease": "{lease_id}", "work": {work}}}'
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
