"""Open work that others run, with a lease for each piece.

Work waits for a worker that asks for some over HTTP, on this machine or others, and nothing of it
begins before. A program outside of the run opens work itself. A lease ends with a report, when the
server withdraws it, or once who has it was silent for too long: a worker sends heartbeats, and a
program outside makes calls. What somebody says of a lease that is over changes nothing. Only
durations of this process's clock count, so the clocks of the machines may differ.

Use a queue only in the event loop's thread.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.errors import Coded, brief
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.sessions.work_matching import AskingWorker, Poll, WorkMatching
from lightning_jax.gateway.sessions.work_messages import (
    EXPIRED,
    LOST,
    SILENT,
    STOPPED,
    ExternalRollouts,
    Report,
    beat_s,
)

log = logging.getLogger(__name__)

TICKS = 10  # parts of `lease_s` in which silence is counted
POLL_S = 20.0  # how long a worker waits for work before it asks again; proxies wait for a minute
MAX_ENDED = 10_000  # leases whose end is remembered
UNUSED_S = 30.0  # without a call since a program outside opened work: the answer may have been lost


class LeaseLost(Coded):
    """End of a lease without a report.

    The reason is "worker_silent" if the worker sent no heartbeat and its run replaces it, otherwise
    "worker_lost". `is_silent` is True if it sent no heartbeat.
    """

    def __init__(self, message: str, *, reason: str, key: str, is_silent: bool) -> None:
        super().__init__(message, reason=reason, key=key)
        self.is_silent = is_silent


@dataclass(eq=False)
class _Lease:
    """Lease of a worker, or of a program outside, whose `idle_s` are those since its last call."""

    report: asyncio.Future[Report]
    worker: AskingWorker | None = None
    silent_before_s: float = 0.0  # of the worker
    silent_ticks: int = 0
    idle_s: Callable[[], float] | None = None
    began_s: float = field(default_factory=time.monotonic)


class LeaseQueue:
    """Waiting work, waiting workers, and the leases of all open work of a gateway.

    `outside` is the run that takes rollouts from outside, or None.
    """

    def __init__(self) -> None:
        self.outside: ExternalRollouts | None = None
        self.lease_s = 0.0
        self.agent: Mapping[str, str] | None = None  # None: there is no work for workers
        self._matching = WorkMatching()
        self._leases: dict[str, _Lease] = {}
        self._replaceable: dict[str, asyncio.Event] = {}  # by worker, set once it is silent
        self._ended: OrderedDict[str, str] = OrderedDict()  # why, by lease
        self._is_closed = False
        self._polled_s = time.monotonic()
        self.num_taken = 0  # leases of workers so far
        self.num_lost = 0  # of them, without a report because the worker was lost

    @asynccontextmanager
    async def opened(self, agent: Mapping[str, str], lease_s: float) -> AsyncIterator["LeaseQueue"]:
        """Let workers take work while this context is open. Then send waiting workers away.

        `agent` has a digest for each setting of the agent. Workers with other digests are refused.
        """
        self.agent, self.lease_s = dict(agent), lease_s
        self._is_closed, self._polled_s = False, time.monotonic()
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield self
        finally:
            self._is_closed = True
            sweeping.cancel()
            for worker in list(self._matching.workers.values()):
                self._matching.send_away(worker)

    @asynccontextmanager
    async def worker(self, *, alone: bool = False) -> AsyncIterator["Reservation"]:
        """Wait for a worker that asks for work, first come, first served.

        `alone` is for work that may harm what else runs there. It waits until the worker with least
        to do has nothing else, and nothing else begins there meanwhile. Raises the error of `fail`.
        """
        worker = Reservation(self, await self._matching.match(alone=alone), alone=alone)
        try:
            yield worker
        finally:
            worker.leave()

    async def take(self, worker: str) -> tuple[str, str] | None:
        """Return a lease for a worker: its id, and the work as JSON. None: the worker asks again.

        Raise ApiError if the queue is closed.
        """
        if self._is_closed:
            raise ApiError(503, "draining", "the run is ending; ask again later.", retry_after_s=5)
        asking = self._matching.workers.setdefault(worker, AskingWorker(worker))
        asking.hear(self._patience_s)
        self._polled_s = asking.heard_s
        poll = self._matching.add_poll(asking)
        try:
            await asyncio.wait({poll.answer}, timeout=POLL_S)
            return await poll.answer if poll.is_matched or poll.answer.done() else None
        finally:
            poll.answer.cancel()  # what has it asks another worker
            self._matching.remove_poll(poll)

    def beat(self, lease_ids: Iterable[str]) -> dict[str, str]:
        """Note that a worker still has these leases. Return why, for those that are over."""
        over = {}
        for lease_id in lease_ids:
            lease = self._find(lease_id)
            if lease and lease.worker:
                lease.silent_ticks = lease.worker.silent_ticks = 0
                lease.worker.hear(self._patience_s)
            else:
                over[lease_id] = self._end_of(lease_id)
        return over

    def report(self, lease_id: str, report: Report) -> None:
        """End a lease with its outcome. Raise ApiError if it is over."""
        if (lease := self._find(lease_id)) is None:
            raise ApiError(
                410, "lease_over", f"{self._end_of(lease_id)}; drop its result.", key=lease_id
            )
        if worker := lease.worker:
            worker.hear(self._patience_s)
            if report.reason != STOPPED:
                self._matching.note(worker, None if report.status == "scored" else report.reason)
        self._end(lease_id, "has been reported").report.set_result(report)

    def is_open(self, lease_id: str) -> bool:
        """Return True if a report would end the lease."""
        return self._find(lease_id) is not None

    async def lease_outside(
        self, lease_id: str, idle_s: Callable[[], float], max_idle_s: float
    ) -> Report:
        """Lease work to the program outside that opened it, and return its report.

        The lease expires once no call came for `max_idle_s`. `idle_s` returns the seconds since the
        last one.
        """
        report = asyncio.get_running_loop().create_future()
        self._leases[lease_id] = _Lease(report, idle_s=idle_s)
        try:
            while not report.done() and (left_s := max_idle_s - idle_s()) > 0:
                await asyncio.wait({report}, timeout=left_s)
            if not report.done():
                self._expire(lease_id, f"agent.idle_s={max_idle_s:g} s, and no reward was posted")
            return report.result()
        finally:
            if lease_id in self._leases:
                self._end(lease_id, "was withdrawn, because its rollout ended without it")

    def expire_unused(self) -> str | None:
        """End the oldest lease of a program outside without a call for UNUSED_S since it began.

        Return its id, or None if there is none.
        """
        for lease_id, lease in self._leases.items():
            age_s = time.monotonic() - lease.began_s
            if lease.idle_s and lease.idle_s() >= age_s >= UNUSED_S:
                self._expire(lease_id, f"{age_s:.0f} s, and another rollout was to be opened")
                return lease_id
        return None

    def _expire(self, lease_id: str, why: str) -> None:
        """End a lease of a program outside. A reward that was posted for it counts."""
        report = Report(
            kind="no_reward",
            status="infrastructure_failure",
            reason=EXPIRED,
            detail=f"no request came for {why}",
        )
        self.report(lease_id, report)

    def drop(self, worker: str, why: str) -> None:
        """End the leases of a worker whose process has ended."""
        if lost := self._matching.workers.get(worker):
            self._lose_all(lost, why)

    def fail(self, error: Exception) -> None:
        """Let everything that waits for a worker, now or later, raise the error."""
        self._matching.fail(error)

    async def silence(self, worker: str) -> None:
        """Wait until a worker is silent. The caller can end and replace it."""
        silent = self._replaceable[worker] = asyncio.Event()
        try:
            await silent.wait()
        finally:
            if self._replaceable.get(worker) is silent:
                del self._replaceable[worker]

    @property
    def num_workers(self) -> int:
        """Number of workers that have a lease or wait for one."""
        return len(self._matching.workers)

    @property
    def unasked_s(self) -> float:
        """Seconds since a worker last asked for work."""
        return time.monotonic() - self._polled_s

    @property
    def _patience_s(self) -> float:
        """Longest time between two heartbeats of a worker that is not silent."""
        return 2 * beat_s(self.lease_s)

    def _begin(self, poll: Poll, work: str) -> tuple[str, _Lease]:
        """Answer a matched poll, and return its lease."""
        lease_id = secrets.token_hex(12)
        worker = poll.worker
        if not any(lease.worker is worker for lease in self._leases.values()):
            worker.heard_s, worker.silent_ticks = time.monotonic(), 0  # it sent no heartbeats
        report = asyncio.get_running_loop().create_future()
        lease = self._leases[lease_id] = _Lease(report, worker, worker.silent_s)
        self.num_taken += 1
        poll.answer.set_result((lease_id, work))
        return lease_id, lease

    def _find(self, lease_id: str) -> _Lease | None:
        """Return the lease unless it is over, or its rollout has just been cancelled."""
        lease = self._leases.get(lease_id)
        return None if lease is None or lease.report.done() else lease

    def _end(self, lease_id: str, why: str) -> _Lease:
        lease = self._leases.pop(lease_id)
        if lease.worker:
            self._matching.let_go(lease.worker)
        self._ended[lease_id] = f"lease {lease_id} {why}"
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return lease

    def _lose(
        self, lease_id: str, worker: AskingWorker, why: str, *, is_silent: bool = False
    ) -> None:
        lease = self._end(lease_id, f"is over, because its worker {why}")
        name = worker.name
        self.num_lost += 1
        reason = SILENT if is_silent and name in self._replaceable else LOST
        message = f"worker {name} {why}"
        lease.report.set_exception(LeaseLost(message, reason=reason, key=name, is_silent=is_silent))

    def _lose_all(self, worker: AskingWorker, why: str, *, is_silent: bool = False) -> int:
        """End all leases of a worker and send it away. Return the number of leases."""
        self._matching.send_away(worker)
        lost = [i for i, lease in self._leases.items() if lease.worker is worker and self._find(i)]
        for lease_id in lost:
            self._lose(lease_id, worker, why, is_silent=is_silent)
        return len(lost)

    def _end_of(self, lease_id: str) -> str:
        unknown = f"lease {brief(lease_id)} is unknown, because the server started after it began"
        return self._ended.get(lease_id, unknown)

    async def _sweep(self) -> None:
        """End leases whose workers are silent.

        Ticks are counted, because heartbeats wait, too, while this process stands still.
        """
        while True:
            await asyncio.sleep(self.lease_s / TICKS)
            why = f"sent no heartbeat for {self.lease_s:g} s"
            for worker in {lease.worker for lease in self._leases.values() if lease.worker}:
                worker.silent_ticks += 1
                if worker.silent_ticks > TICKS:
                    self._silence(worker, why)
            for lease_id, lease in list(self._leases.items()):  # of workers that forgot them
                lease.silent_ticks += 1
                if lease.worker and lease.silent_ticks > TICKS and self._find(lease_id):
                    self._lose(lease_id, lease.worker, why)

    def _silence(self, worker: AskingWorker, why: str) -> None:
        """End the leases of a silent worker, and let its run replace it."""
        number = self._lose_all(worker, why, is_silent=True)
        silent = self._replaceable.get(worker.name)
        log.warning(
            "worker %s %s; its %d rollouts are tried again, and %s",
            *(worker.name, why, number),
            "it is replaced" if silent else "if it is stuck, start it again",
            extra={"event": "worker_silent", "worker": worker.name, "number": number},
        )
        if silent:
            silent.set()


class Reservation:
    """Worker that waits for one piece of work, which it gets with `run`."""

    def __init__(self, queue: LeaseQueue, poll: Poll, *, alone: bool) -> None:
        self._queue, self._poll, self._alone = queue, poll, alone
        self._lease: _Lease | None = None
        self._is_used = False

    @property
    def name(self) -> str:
        return self._poll.worker.name

    async def run(self, work: str) -> Report:
        """Lease the work, which is JSON, to the worker and return its report.

        If the worker has hung up, wait for the next one. If cancelled, withdraw the lease. Raises
        LeaseLost if the worker is lost.
        """
        while self._poll.answer.done():
            self._queue._matching.let_go(self._poll.worker)
            self._is_used = True  # in case that the wait is cancelled
            self._poll = await self._queue._matching.match(alone=self._alone, first=True)
            self._is_used = False
        self._is_used = True
        lease_id, lease = self._queue._begin(self._poll, work)
        self._lease = lease
        try:
            return await lease.report
        finally:
            if lease_id in self._queue._leases:
                self._queue._end(lease_id, "was withdrawn, because its rollout ended without it")
            elif not lease.report.cancelled():
                lease.report.exception()  # retrieved, even if this was cancelled meanwhile

    async def silent_s(self, running: asyncio.Future[Any]) -> float:
        """Wait for the next sign of life from the worker, or until its work has ended as `running`.

        Return the seconds of the work in which the worker was silent, at most as long as a lease.
        """
        if (lease := self._lease) is None:
            return 0.0
        worker = self._poll.worker
        hearing = asyncio.create_task(worker.heard.wait())
        try:
            await asyncio.wait({hearing, running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hearing.cancel()
        return min(worker.silent_s - lease.silent_before_s, self._queue.lease_s)

    def leave(self) -> None:
        """Send the worker away, unless it got work."""
        if not self._is_used:
            self._queue._matching.release(self._poll)
