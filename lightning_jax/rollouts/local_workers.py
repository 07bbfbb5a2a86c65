"""Workers on the run's own machine: processes that are started again if they die or fall silent.

They end with the run, also if it is killed.
"""

import asyncio
import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_jax.errors import UserError
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.sessions.leases import LeaseQueue
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.rollouts.fingerprint import fingerprint
from lightning_jax.rollouts.workers import Workers
from lightning_jax.settings import ConfigError
from lightning_jax.system.child_process import ChildProcess, kill_group

log = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("worker_child.py")
END_S = 10.0  # for a worker to end its agents
QUICK_S = 10.0  # a worker that ends sooner has hardly worked
MAX_QUICK = 5  # such ends in a row before the run gives up
MAX_DELAY_S = 30.0  # before a worker is started again


@runtime_checkable
class OtherWorkers(Protocol):
    """Workers that something else than this module starts, on this machine or others."""

    number: int

    async def keep(self, index: int, settings: dict[str, Any], queue: LeaseQueue) -> None:
        """Run a worker, and start it again whenever it ends. If cancelled, end it."""
        ...


@asynccontextmanager
async def open_workers(
    agent: AgentConfig,
    number: int,
    gateway: Gateway,
    config: RolloutConfig,
    others: OtherWorkers | None = None,
) -> AsyncIterator[Workers]:
    """Yield the workers of a run, `number` of them on this machine, while this context is open.

    Further ones may join. The gateway must have started.
    """
    num_others = others.number if others else 0
    queue = LeaseQueue(fingerprint(agent), agent.lease_s)
    gateway.give_work(queue)
    settings = {
        "agent": asdict(agent),
        "key": gateway.api_key,
        "concurrency": math.ceil(config.concurrency / max(number + num_others, 1)),
        "sys_path": sys.path,
    }
    local = {**settings, "url": gateway.local_url}
    away = {**settings, "url": gateway.url}
    hint = (
        f"start one with: lightning-jax worker --server {gateway.url} --key KEY, where KEY is "
        "serve.api_key"
    )
    async with queue.opened():
        working = [_keep({**local, "name": f"local-{i}"}, queue) for i in range(number)]
        if others:
            working += [
                others.keep(i, {**away, "name": f"cluster-{i}"}, queue) for i in range(num_others)
            ]
        keeping = [asyncio.create_task(keep) for keep in working]
        try:
            yield Workers(queue, "" if number + num_others else hint)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)


async def _keep(settings: dict[str, Any], queue: LeaseQueue) -> None:
    """Run a worker, and start it again whenever it ends or falls silent."""
    name, num_quick = settings["name"], 0
    while True:
        started = time.monotonic()
        status, error = await _run(settings, queue)
        if status is None:
            num_quick = 0
            continue
        queue.drop(name, f"ended with exit status {status}")
        if error is not None:
            queue.fail(unusable(error))
            return
        num_quick = num_quick + 1 if time.monotonic() - started < QUICK_S else 0
        if num_quick == MAX_QUICK:
            queue.fail(
                UserError(
                    f"worker {name} of this machine ended {MAX_QUICK} times in a row soon after "
                    f"its start, the last time with exit status {status}; read what it printed, "
                    "or set agent.workers=0.",
                    reason="worker_ended",
                    key=name,
                )
            )
            return
        log.warning(
            "worker %s ended with exit status %d; starting it again",
            name,
            status,
            extra={"event": "worker_ended", "worker": name, "status": status},
        )
        await asyncio.sleep(min(2.0**num_quick - 1, MAX_DELAY_S))


def unusable(error: Mapping[str, Any]) -> ConfigError:
    """Return the error that a worker reports if it cannot run the agent."""
    return ConfigError(error["message"], reason=error["reason"], key=error["key"])


async def _run(
    settings: dict[str, Any], queue: LeaseQueue
) -> tuple[int | None, dict[str, Any] | None]:
    """Return a worker's exit status, and its error if it cannot run the agent.

    If the worker falls silent, kill it and return None as status. If cancelled, end it.
    """
    child, received = ChildProcess(["-P", str(CHILD)], end_s=END_S), bytearray()
    silent = asyncio.create_task(queue.silence(settings["name"]))
    silent.add_done_callback(lambda task: task.cancelled() or kill_group(child.popen.pid))
    try:
        child.socket.setblocking(False)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # it died
            await loop.sock_sendall(child.socket, json.dumps(settings).encode() + b"\n")
            while chunk := await loop.sock_recv(child.socket, 4096):
                received += chunk
    finally:
        is_silent = not silent.cancel()
        status = await child.end_async()
    return None if is_silent else status, json.loads(received) if received else None
