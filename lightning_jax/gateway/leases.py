"""Queue of work that workers take over HTTP, on this machine or others, with a lease for each.

Work waits for a worker that asks, and nothing of it begins before. A lease ends with the worker's
report, when the server withdraws it, or once the worker has been silent for too long. What a worker
says of a lease that is over changes nothing. Only durations of this process's clock count, so the
clocks of the machines may differ.

Use a queue only in the event loop's thread.
"""

import asyncio
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lightning_jax.errors import Coded
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.fields import Fields, FiniteNumber, brief

TICKS = 10  # parts of `lease_s` in which silence is counted
POLL_S = 20.0  # how long a worker waits for work before it asks again; proxies wait for a minute
MAX_ENDED = 10_000  # leases whose end is remembered
MAX_CHARS = 2000  # of a reported detail; the rest is cut

Reason = Annotated[str, Field(min_length=1, max_length=100)]


class Report(Fields):
    """Outcome of work, as a worker reports it.

    `kind` is "lost_gateway" if the agent's connection to the gateway failed, and "no_reward" if it
    returned no reward and may have posted one.
    """

    kind: Literal["outcome", "lost_gateway", "no_reward"] = "outcome"
    status: Literal["scored", "agent_failure", "infrastructure_failure"]
    reward: FiniteNumber | None = None
    reason: Reason | None = None
    detail: str | None = None
    metrics: dict[str, Any] | None = None  # the run drops and counts what is no finite number

    @field_validator("detail")
    @classmethod
    def _cut(cls, detail: str | None) -> str | None:
        return detail and detail[:MAX_CHARS]

    def check(self) -> None:
        """Raise ApiError if the reward or the reason is missing."""
        name = "reward" if self.status == "scored" else "reason"
        if getattr(self, name) is None:
            message = f"{name} is missing; add it to a report with status {self.status}."
            raise invalid(message, name, reason="missing")


class LeaseLost(Coded):
    """End of a lease without a report. The reason is "worker_lost"."""


@dataclass(eq=False)
class _Poll:
    """Request of a worker that waits for work."""

    worker: str
    # Id of the lease and its work as JSON; None: ask again.
    answer: asyncio.Future[tuple[str, str] | None]
    is_matched: bool = False


@dataclass(eq=False)
class _Lease:
    worker: str
    report: asyncio.Future[Report]
    silent_ticks: int = 0


class LeaseQueue:
    """Waiting work, waiting workers, and the leases between them.

    `agent` has a digest for each setting of the agent. Workers with other digests are refused.
    """

    def __init__(self, agent: Mapping[str, str], lease_s: float) -> None:
        self.agent, self.lease_s = dict(agent), lease_s
        self._waiting: deque[asyncio.Future[_Poll]] = deque()
        self._polls: dict[str, deque[_Poll]] = {}  # by worker; none is empty
        self._leases: dict[str, _Lease] = {}
        self._held: Counter[str] = Counter()  # matched polls and leases of each worker
        self._ended: OrderedDict[str, str] = OrderedDict()  # why, by lease
        self._error: Exception | None = None
        self._is_closed = False
        self.num_taken = 0  # leases so far
        self.num_lost = 0  # of them, without a report because the worker was lost

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["LeaseQueue"]:
        """Count silent workers while this context is open. Then send waiting workers away."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield self
        finally:
            self._is_closed = True
            sweeping.cancel()
            for poll in [poll for polls in self._polls.values() for poll in polls]:
                poll.answer.set_result(None)
            self._polls.clear()

    @asynccontextmanager
    async def worker(self) -> AsyncIterator["WaitingWorker"]:
        """Wait for a worker that asks for work, first come, first served.

        Raises the error of `fail`.
        """
        worker = WaitingWorker(self, await self._match())
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
        poll = _Poll(worker, asyncio.get_running_loop().create_future())
        self._polls.setdefault(worker, deque()).append(poll)
        self._dispatch()
        try:
            await asyncio.wait({poll.answer}, timeout=POLL_S)
            return await poll.answer if poll.is_matched or poll.answer.done() else None
        finally:
            poll.answer.cancel()  # what has it asks another worker
            if poll in self._polls.get(worker, ()):
                self._remove(poll)

    def beat(self, lease_ids: Iterable[str]) -> dict[str, str]:
        """Note that a worker still has these leases. Return why, for those that are over."""
        over = {}
        for lease_id in lease_ids:
            if lease := self._find(lease_id):
                lease.silent_ticks = 0
            else:
                over[lease_id] = self._end_of(lease_id)
        return over

    def report(self, lease_id: str, report: Report) -> None:
        """End a lease with its outcome. Raise ApiError if it is over."""
        if self._find(lease_id) is None:
            raise ApiError(
                410, "lease_over", f"{self._end_of(lease_id)}; drop its result.", key=lease_id
            )
        self._end(lease_id, "has been reported").report.set_result(report)

    def drop(self, worker: str, why: str) -> None:
        """End the leases of a worker whose process has ended."""
        for lease_id, lease in list(self._leases.items()):
            if lease.worker == worker and self._find(lease_id):
                self._lose(lease_id, why)

    def fail(self, error: Exception) -> None:
        """Let everything that waits for a worker, now or later, raise the error."""
        self._error = error
        while self._waiting:
            if not (waiting := self._waiting.popleft()).done():
                waiting.set_exception(error)

    @property
    def num_workers(self) -> int:
        """Number of workers that have a lease or wait for one."""
        return len({*self._polls, *(lease.worker for lease in self._leases.values())})

    async def _match(self, *, first: bool = False) -> _Poll:
        """Wait for a poll. The caller must answer or release it."""
        if self._error is not None:
            raise self._error
        waiting: asyncio.Future[_Poll] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if first else self._waiting.append)(waiting)
        self._dispatch()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._release(waiting.result())
            raise

    def _dispatch(self) -> None:
        """Match what waits with the workers that have least to do."""
        while self._waiting and self._polls:
            if (waiting := self._waiting.popleft()).done():  # cancelled
                continue
            poll = self._polls[min(self._polls, key=self._held.__getitem__)][0]
            self._remove(poll)
            self._held[poll.worker] += 1
            poll.is_matched = True
            waiting.set_result(poll)

    def _remove(self, poll: _Poll) -> None:
        polls = self._polls[poll.worker]
        polls.remove(poll)
        if not polls:
            del self._polls[poll.worker]

    def _release(self, poll: _Poll) -> None:
        """Send a matched poll away without work."""
        self._let_go(poll.worker)
        if not poll.answer.done():
            poll.answer.set_result(None)

    def _let_go(self, worker: str) -> None:
        self._held[worker] -= 1
        if not self._held[worker]:
            del self._held[worker]

    def _begin(self, poll: _Poll, work: str) -> tuple[str, _Lease]:
        """Answer a matched poll, and return its lease."""
        lease_id = secrets.token_hex(12)
        lease = _Lease(poll.worker, asyncio.get_running_loop().create_future())
        self._leases[lease_id] = lease
        self.num_taken += 1
        poll.answer.set_result((lease_id, work))
        return lease_id, lease

    def _find(self, lease_id: str) -> _Lease | None:
        """Return the lease unless it is over, or its rollout has just been cancelled."""
        lease = self._leases.get(lease_id)
        return None if lease is None or lease.report.done() else lease

    def _end(self, lease_id: str, why: str) -> _Lease:
        lease = self._leases.pop(lease_id)
        self._let_go(lease.worker)
        self._ended[lease_id] = f"lease {lease_id} {why}"
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return lease

    def _lose(self, lease_id: str, why: str) -> None:
        lease = self._end(lease_id, f"is over, because its worker {why}")
        self.num_lost += 1
        message = f"worker {lease.worker} {why}"
        lease.report.set_exception(LeaseLost(message, reason="worker_lost", key=lease.worker))

    def _end_of(self, lease_id: str) -> str:
        unknown = f"lease {brief(lease_id)} is unknown, because the server started after it began"
        return self._ended.get(lease_id, unknown)

    async def _sweep(self) -> None:
        """End leases whose workers are silent.

        Ticks are counted, because heartbeats wait, too, while this process stands still.
        """
        while True:
            await asyncio.sleep(self.lease_s / TICKS)
            for lease_id, lease in list(self._leases.items()):
                lease.silent_ticks += 1
                if lease.silent_ticks > TICKS and self._find(lease_id):
                    self._lose(lease_id, f"sent no heartbeat for {self.lease_s:g} s")


class WaitingWorker:
    """Worker that waits for one piece of work."""

    def __init__(self, queue: LeaseQueue, poll: _Poll) -> None:
        self._queue, self._poll = queue, poll
        self._is_used = False

    async def run(self, work: str) -> Report:
        """Lease the work, which is JSON, to the worker and return its report.

        If the worker has hung up, wait for the next one. If cancelled, withdraw the lease. Raises
        LeaseLost if the worker is lost.
        """
        while self._poll.answer.done():
            self._queue._let_go(self._poll.worker)
            self._is_used = True  # in case that the wait is cancelled
            self._poll = await self._queue._match(first=True)
            self._is_used = False
        self._is_used = True
        lease_id, lease = self._queue._begin(self._poll, work)
        try:
            return await lease.report
        finally:
            if lease_id in self._queue._leases:
                self._queue._end(lease_id, "was withdrawn, because its rollout ended without it")
            elif not lease.report.cancelled():
                lease.report.exception()  # retrieved, even if this was cancelled meanwhile

    def leave(self) -> None:
        """Send the worker away, unless it got work."""
        if not self._is_used:
            self._queue._release(self._poll)
