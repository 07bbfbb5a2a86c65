"""Worker: takes rollouts from a run's server over HTTP, and runs the agent on them.

It needs neither JAX nor the model. An agent is loaded once and runs on many rollouts at once.
`main` is the process of a worker on the run's own machine.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lightning_jax.errors import UserError
from lightning_jax.gateway.sessions.work_messages import VERSION, beat_s
from lightning_jax.rollouts.agents.event_loop import isolate_agent
from lightning_jax.rollouts.agents.functions import Agent, end_agent, ended_outcome, run_agent
from lightning_jax.rollouts.agents.outcome import Outcome
from lightning_jax.rollouts.agents.program import make_agent
from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.rollouts.workers.work import (
    LeasedWork,
    as_report,
    fingerprint,
    missing_path,
    stopped,
)
from lightning_jax.system.clock import backoff_s
from lightning_jax.system.network import go_direct
from lightning_jax.system.text import plain_handler
from lightning_jax.traces.context import OpenSpan, below, flush_process_tracer, parent_in

log = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 60.0  # the server answers within 20 s
CALL_TIMEOUT_S = 10.0
STOP_S = 2.0  # to give leases back when the worker stops
ARRIVAL_S = 0.2  # for a lease that is on its way when the worker stops
FIRST_DELAY_S, MAX_DELAY_S = 0.25, 10.0  # between two tries to reach the server


class Refused(UserError):
    """Refusal by the server that trying again would not change."""


class Unreachable(Exception):
    """Failure to reach the server, or its own failure. It may pass."""


@dataclass(frozen=True)
class Server:
    """Address and key of a run's server."""

    url: str
    key: str = field(repr=False)


@dataclass
class RunningLease:
    """Lease that this worker runs. `over` has the reason once the server has ended it."""

    work: LeasedWork
    over: asyncio.Future[str]


def worker_name() -> str:
    """Return a name for a worker in this process: its machine, its process id and a random part."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


async def run_from_settings(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Load the agent that a run's settings name, and work until cancelled.

    Return the error as a dict if the agent is unusable here.
    """
    agent_settings = settings["agent"]
    config = AgentConfig(**{**agent_settings, "env": tuple(agent_settings["env"])})
    go_direct(settings["url"])  # before the agent makes its clients
    try:
        agent = await asyncio.to_thread(make_agent, config)
        await run_worker(
            agent,
            fingerprint(config),
            Server(settings["url"], settings["key"]),
            concurrency=settings["concurrency"],
            name=settings["name"],
        )
    except UserError as error:  # Refused: the agent's file was edited after the run began
        return {"message": str(error), "reason": error.reason, "key": error.key}
    except Exception as error:  # noqa: BLE001  (foreign code at import)
        traceback.print_exc()
        words = f"the agent cannot be loaded: {type(error).__name__}: {error}"
        return {"message": words[:2000], "reason": "not_loaded", "key": "agent.function"}
    return None


def main() -> None:
    """Work for the run that started this process, until it closes the socket at standard input.

    The socket brings one line of JSON with the settings. The answer is one line if the agent cannot
    be loaded.
    """
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # the agent must not read from the socket
    os.close(null)
    logging.basicConfig(level=logging.WARNING, handlers=[plain_handler()])
    with channel.makefile("rb") as lines:
        line = lines.readline()
    error = asyncio.run(_until_closed(channel, json.loads(line))) if line else None
    if error is not None:  # no worker can run the agent
        channel.setblocking(True)
        channel.sendall(json.dumps(error).encode() + b"\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of agents


async def _until_closed(
    channel: socket.socket, settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Work until the run closes the socket. Return the error of an agent that is unusable."""
    channel.setblocking(False)
    closed = asyncio.create_task(asyncio.get_running_loop().sock_recv(channel, 1))
    working = asyncio.create_task(run_from_settings(settings))
    await asyncio.wait({closed, working}, return_when=asyncio.FIRST_COMPLETED)
    working.cancel()
    await asyncio.wait({working})
    return None if working.cancelled() else working.result()


async def run_worker(
    agent: Agent, digests: Mapping[str, str], server: Server, *, concurrency: int, name: str
) -> None:
    """Take and run rollouts until cancelled. Then give running ones back.

    While the server does not answer, try again. Raises Refused if it does not accept this worker.
    """
    headers = {"Authorization": f"Bearer {server.key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        isolate_agent(agent) as isolated,
        aiohttp.ClientSession(headers=headers, connector=connector) as http,
    ):
        worker = Worker(isolated, digests, server.url, http, name)
        await worker.run(concurrency)


class Worker:
    """Taker of leases. See `run_worker`."""

    def __init__(
        self,
        agent: Agent,
        fingerprint: Mapping[str, str],
        url: str,
        http: aiohttp.ClientSession,
        name: str,
    ) -> None:
        self._agent, self._fingerprint = agent, dict(fingerprint)
        self._url, self._http, self._name = url.rstrip("/"), http, name
        self._leases: dict[str, RunningLease] = {}
        self._is_reachable = True  # as last logged
        self._answered_at = time.monotonic()
        self._lease_s: float | None = None  # as the server last said
        self._has_length = asyncio.Event()  # set when that changes

    async def run(self, concurrency: int) -> None:
        """Run up to `concurrency` rollouts at once until cancelled."""
        free = asyncio.Semaphore(concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                while True:
                    await free.acquire()
                    lease_id, work = await self._take_or_return()
                    lease = RunningLease(work, asyncio.get_running_loop().create_future())
                    self._leases[lease_id] = lease
                    running = group.create_task(self._do(lease_id, lease))
                    running.add_done_callback(lambda _: free.release())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _take_or_return(self) -> tuple[str, LeasedWork]:
        """Return the next lease and its work. If cancelled, give back a lease that just arrives."""
        taking = asyncio.create_task(self._take())
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait({taking}, timeout=ARRIVAL_S)
            if taking.done() and not taking.cancelled() and not taking.exception():
                await self._give_back(taking.result()[0])
            raise
        finally:
            taking.cancel()

    async def _give_back(self, lease_id: str) -> None:
        """Report that this worker has stopped, as far as the server can be reached."""
        with contextlib.suppress(Unreachable, Refused):
            await self._post(f"{lease_id}/report", as_report(stopped()), STOP_S)

    async def _take(self) -> tuple[str, LeasedWork]:
        body = {"worker": self._name, "agent": self._fingerprint, "version": VERSION}
        while True:
            answer = await self._post_until_answered("take", body, TAKE_TIMEOUT_S)
            if (version := answer.get("version")) != VERSION:
                if lease_id := answer.get("lease"):
                    await self._give_back(lease_id)
                raise Refused(
                    f"{self._url} speaks version {version or 0} of the lease protocol and this "
                    f"worker version {VERSION}; install the run's release of lightning_jax here.",
                    reason="other_release",
                    key="version",
                )
            if answer["lease_s"] != self._lease_s:
                self._lease_s = answer["lease_s"]
                self._has_length.set()
            if answer["lease"] is not None:
                return answer["lease"], LeasedWork.from_json(answer["work"])

    async def _beat(self) -> None:
        """Send heartbeats, and end the rollouts whose leases are over."""
        while True:
            await self._pause()
            if not self._leases or not self._lease_s:
                continue
            try:
                body = {"leases": list(self._leases)}
                over = (await self._post("heartbeat", body, beat_s(self._lease_s)))["over"]
            except Unreachable:
                over = {}
                if time.monotonic() - self._answered_at > self._lease_s:
                    over = dict.fromkeys(self._leases, "the server cannot be reached")
            for lease_id, why in over.items():
                lease = self._leases.get(lease_id)
                if lease and not lease.over.done():
                    lease.over.set_result(why)

    async def _pause(self) -> None:
        """Wait until the next heartbeat is due, or leases have another length."""
        self._has_length.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s and beat_s(self._lease_s)):
                await self._has_length.wait()

    async def _do(self, lease_id: str, lease: RunningLease) -> None:
        """Run one rollout and report its outcome, unless its lease ends first."""
        work = lease.work
        running = asyncio.create_task(self._outcome(work))
        try:
            await asyncio.wait({running, lease.over}, return_when=asyncio.FIRST_COMPLETED)
            if not lease.over.done():
                await asyncio.to_thread(flush_process_tracer)
                await self._report(lease_id, ended_outcome(running), lease)
        except asyncio.CancelledError:
            await self._give_back(lease_id)
            raise
        finally:
            del self._leases[lease_id]
            if lease.over.done():
                log.info("%s: %s", work.rollout_id, lease.over.result())
            if not running.done():
                await end_agent(running, work.rollout_id)

    async def _outcome(self, work: LeasedWork) -> Outcome:
        if missing := missing_path(work, self._name):
            return missing
        parent = parent_in({"traceparent": work.traceparent or ""})
        root = OpenSpan(parent[0], span_id=parent[1]) if parent else OpenSpan()
        with below(root):
            return await run_agent(self._agent, work.task, work.llm, work.limits)

    async def _report(self, lease_id: str, outcome: Outcome, lease: RunningLease) -> None:
        """Report until the server has answered or the lease is over."""
        path, body = f"{lease_id}/report", as_report(outcome)
        reporting = asyncio.create_task(self._post_until_answered(path, body, CALL_TIMEOUT_S))
        try:
            await asyncio.wait({reporting, lease.over}, return_when=asyncio.FIRST_COMPLETED)
            if reporting.done():
                reporting.result()
        except Refused as error:
            log.warning(
                "%s: %s",
                lease.work.rollout_id,
                error,
                extra={"event": "lease_refused", "reason": error.reason},
            )
        finally:
            reporting.cancel()

    async def _post_until_answered(
        self, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """Post and return the answer. While the server is not reachable, wait and try again."""
        num_failures = 0
        while True:
            try:
                return await self._post(path, body, timeout_s)
            except Unreachable as error:
                if self._is_reachable:
                    log.warning(
                        "%s does not answer (%s); trying again until it does (Ctrl-C to stop)",
                        self._url,
                        error,
                        extra={"event": "server_unreachable"},
                    )
                self._is_reachable = False
            num_failures += 1
            wait_s = backoff_s(num_failures, FIRST_DELAY_S, MAX_DELAY_S)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the server's answer to one request. Raises Refused or Unreachable."""
        url, timeout = f"{self._url}/v1/leases/{path}", aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.post(url, json=body, timeout=timeout) as answer:
                status, raw = answer.status, await answer.read()
            content = json.loads(raw) if status == 200 else _error_in(raw)
            if not isinstance(content, dict):
                raise ValueError("it answers with something other than an object")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Unreachable(str(error) or type(error).__name__) from error
        if status == 200:
            if not self._is_reachable:
                log.info("%s answers again", self._url)
            self._is_reachable, self._answered_at = True, time.monotonic()
            return content
        message = content.get("message") or f"it answers with status {status}"
        if status >= 500 or status == 429:
            raise Unreachable(message)
        code = content.get("code") or "refused"
        raise Refused(f"{self._url}: {message}", reason=code, key=path)


def _error_in(raw: bytes) -> dict[str, str]:
    """Return the error of a body in OpenAI's format, or {} if it is in another."""
    try:
        error = json.loads(raw)["error"]
    except (ValueError, TypeError, KeyError):
        return {}
    return {str(k): str(v) for k, v in error.items()} if isinstance(error, dict) else {}
