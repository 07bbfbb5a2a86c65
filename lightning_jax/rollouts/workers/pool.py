"""Workers of a run: processes that take rollouts over HTTP, on this machine or others.

The run starts its own workers again if they die or fall silent. They end with it, also if it is
killed.
"""

import asyncio
import contextlib
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from lightning_jax.errors import UserError
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.sessions.leases import LeaseLost, LeaseQueue, Reservation
from lightning_jax.gateway.sessions.work_messages import LOST, SILENT
from lightning_jax.rollouts.agents.outcome import SILENCES, Outcome, failure
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.rollouts.workers.work import (
    LeasedWork,
    existing_paths,
    fingerprint,
    outcome_of_report,
)
from lightning_jax.settings import ConfigError
from lightning_jax.system.child_process import ChildProcess, kill_group
from lightning_jax.system.clock import backoff_s
from lightning_jax.system.threads import run_to_end
from lightning_jax.traces.context import trace_headers
from lightning_jax.types import LLM, Task

log = logging.getLogger(__name__)

UNASKED_S = 30.0  # without a worker that asks, before waiting rollouts are worth a warning
WARNING_S = 600.0  # between two such warnings
MAX_SILENCES = 2  # workers that a task may silence before its agent has failed
END_S = 10.0  # for a worker to end its agents
QUICK_S = 10.0  # a worker that ends sooner has hardly worked
MAX_QUICK = 5  # such ends in a row before the run gives up
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0  # before a worker that ended soon is started again
# Imports of a worker find what they find in this process.
CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1])"
CHILD += "; from lightning_jax.rollouts.workers.worker import main; main()"

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


class WorkerPool:
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
        worker: Reservation,
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


@dataclass(frozen=True)
class StartedWorker:
    """Worker that a run started.

    `end` returns how it ended, and the error if its agent is unusable.
    """

    end: asyncio.Task[tuple[str, dict[str, Any] | None]]
    kill: Callable[[], object]


# Context of a worker with an index and settings. At its end the worker gives its rollouts back and
# ends. Raises ConfigError if no machine can run it.
StartWorker = Callable[[int, dict[str, Any]], AbstractAsyncContextManager[StartedWorker]]


@dataclass(frozen=True)
class OtherMachines:
    """Machines that run `number` workers, and what starts a worker there."""

    number: int
    start: StartWorker


@asynccontextmanager
async def _start_here(index: int, settings: dict[str, Any]) -> AsyncIterator[StartedWorker]:
    child = ChildProcess(["-P", "-c", CHILD, json.dumps(sys.path)], end_s=END_S)
    end = asyncio.create_task(_end_of(child, settings))
    try:
        yield StartedWorker(end, partial(kill_group, child.popen.pid))
    finally:
        end.cancel()
        await asyncio.wait({end})
        await run_to_end(child.end_async())


async def _end_of(
    child: ChildProcess, settings: dict[str, Any]
) -> tuple[str, dict[str, Any] | None]:
    """Send a worker its settings, and wait for its end."""
    received, loop = bytearray(), asyncio.get_running_loop()
    child.socket.setblocking(False)
    with contextlib.suppress(ConnectionError):  # it died
        await loop.sock_sendall(child.socket, json.dumps(settings).encode() + b"\n")
        while chunk := await loop.sock_recv(child.socket, 4096):
            received += chunk
    return f"ended with exit status {await child.end_async()}", json.loads(received or b"null")


@asynccontextmanager
async def open_workers(
    agent: AgentConfig,
    number: int,
    gateway: Gateway,
    config: RolloutConfig,
    others: OtherMachines | None = None,
) -> AsyncIterator[WorkerPool]:
    """Yield the workers of a run, `number` of them on this machine, while this context is open.

    Further ones may join. The gateway must have started.
    """
    num_others = others.number if others else 0
    settings = {
        "agent": asdict(agent),
        "key": gateway.api_key,
        "concurrency": math.ceil(config.concurrency / max(number + num_others, 1)),
    }
    hint = (
        f"start one with: lightning-jax worker --server {gateway.url} --key KEY, where KEY is "
        "serve.api_key"
    )
    local, away = settings | {"url": gateway.local_url}, settings | {"url": gateway.url}
    async with gateway.work.opened(fingerprint(agent), agent.lease_s) as queue:
        workers: list[tuple[StartWorker, int, dict[str, Any]]]
        workers = [(_start_here, i, local | {"name": f"local-{i}"}) for i in range(number)]
        if others:
            names = [{"name": f"cluster-{i}"} for i in range(num_others)]
            workers += [(others.start, i, away | name) for i, name in enumerate(names)]
        keeping = [asyncio.create_task(_keep(*worker, queue)) for worker in workers]
        try:
            yield WorkerPool(queue, "" if number + num_others else hint)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)


async def _keep(
    start: StartWorker, index: int, settings: dict[str, Any], queue: LeaseQueue
) -> None:
    """Run a worker, and start it again whenever it ends or falls silent. If cancelled, end it.

    If it cannot be started or its agent is unusable, all that waits for a worker fails.
    """
    name, num_quick = settings["name"], 0
    while True:
        try:
            async with start(index, settings) as worker:
                started, silent = time.monotonic(), asyncio.create_task(queue.silence(name))
                try:
                    await asyncio.wait({worker.end, silent}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    is_silent = not silent.cancel()
                if is_silent:
                    worker.kill()
        except ConfigError as error:
            queue.fail(error)
            return
        if is_silent:
            num_quick = 0
            continue
        why, fault = worker.end.result()
        queue.drop(name, why)
        if fault is not None:
            queue.fail(ConfigError(fault["message"], reason=fault["reason"], key=fault["key"]))
            return
        num_quick = num_quick + 1 if time.monotonic() - started < QUICK_S else 0
        if num_quick == MAX_QUICK:
            error = UserError(
                f"worker {name} ended {MAX_QUICK} times in a row soon after its start, and the "
                f"last time it {why}; read what it printed, or set agent.workers=0 and "
                "cluster.workers=0.",
                reason="worker_ended",
                key=name,
            )
            queue.fail(error)
            return
        log.warning(
            "worker %s %s; its rollouts are tried again, and it is started again",
            *(name, why),
            extra={"event": "worker_ended", "worker": name},
        )
        await asyncio.sleep(backoff_s(num_quick, FIRST_DELAY_S, MAX_DELAY_S))
