"""Matching of waiting work with the workers that ask for it.

A worker that fails alone gets less work.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from lightning_jax.system.clock import backoff_s

log = logging.getLogger(__name__)

WINDOW = 50  # rollouts of each worker that count
MIN_IN_ROW = 3  # failures before a worker is judged
FIRST_SHARE = 0.25  # of failures that is expected before others have ended a rollout
MAX_CHANCE = 1e-3  # below it, a row of failures is the worker's own fault
MAX_DELAY_S = 60.0  # before such a worker gets another rollout
MAX_WORKERS = 1000  # that are remembered


@dataclass(eq=False)
class AskingWorker:
    """Worker that asks for work or has some."""

    name: str
    polls: deque["Poll"] = field(default_factory=deque)
    num_held: int = 0  # matched polls and leases
    is_alone: bool = False  # True: it has a lease that others must not share it with
    silent_ticks: int = 0  # without a heartbeat, while it has leases
    heard_s: float = field(default_factory=time.monotonic)  # when it last sent something
    silent_s: float = 0.0  # in all, while it had leases
    heard: asyncio.Event = field(default_factory=asyncio.Event)  # another one for each time

    def hear(self, patience_s: float) -> None:
        """Note a sign of life. Longer gaps than `patience_s` between two were silence."""
        now = time.monotonic()
        gap_s, self.heard_s = now - self.heard_s, now
        self.silent_s += gap_s if gap_s > patience_s else 0.0
        self.heard.set()
        self.heard = asyncio.Event()


@dataclass(eq=False)
class Poll:
    """Request of a worker that waits for work."""

    worker: AskingWorker
    # Id of the lease and its work as JSON; None: ask again.
    answer: asyncio.Future[tuple[str, str] | None]
    is_matched: bool = False


@dataclass
class _Record:
    have_failed: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    num_in_row: int = 0  # failures since the last success
    num_delays: int = 0  # in that row
    until: float = 0.0  # when the worker may have another rollout


class WorkerRecords:
    """Failures of workers, compared with each other.

    A worker is failing if the others, with their share of failures, would hardly fail as often in a
    row. It then gets one rollout at a time, each after a longer pause, until one is scored. Others
    that are still busy with their first rollouts count as workers that mostly score.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()  # last noted one last

    def note(self, worker: str, reason: str | None, now: float, *, has_others: bool) -> float:
        """Note the end of a rollout: the reason of its failure, or None if it was scored.

        `has_others` is True if other workers have work, too. Return the seconds until the worker
        may have another one.
        """
        record = self._records.setdefault(worker, _Record())
        self._records.move_to_end(worker)
        if len(self._records) > MAX_WORKERS:
            self._records.popitem(last=False)
        record.have_failed.append(reason is not None)
        if reason is None:
            record.num_in_row = record.num_delays = 0
            record.until = 0.0
            return 0.0
        record.num_in_row += 1
        if now < record.until:  # it began before
            return 0.0
        if self._chance(worker, record.num_in_row, has_others) >= MAX_CHANCE:
            record.num_delays = 0
            return 0.0
        if record.num_delays == 0:
            log.warning(
                "worker %s failed %d rollouts in a row, the last one with %s, unlike others; it "
                "gets less work until it scores one, so look at what it printed",
                *(worker, record.num_in_row, reason),
                extra={"event": "worker_fails", "worker": worker, "reason": reason},
            )
        record.num_delays += 1
        delay_s = backoff_s(record.num_delays, 1.0, MAX_DELAY_S)
        record.until = now + delay_s
        return delay_s

    def may_take(self, worker: str, num_held: int, now: float) -> bool:
        """Return True if the worker, which has `num_held` rollouts, may have another."""
        record = self._records.get(worker)
        if record is None or not record.num_delays:
            return True
        return num_held == 0 and now >= record.until

    def _chance(self, worker: str, number: int, has_others: bool) -> float:
        """Return the chance that another worker fails so many times in a row."""
        if number < MIN_IN_ROW:
            return 1.0
        others = [r.have_failed for name, r in self._records.items() if name != worker]
        num_failed, total = sum(map(sum, others)), sum(map(len, others))
        if total:
            share = 1.0 if num_failed == total else (num_failed + 1) / (total + 2)
        else:
            share = FIRST_SHARE if has_others else 1.0
        return share ** min(number, WINDOW)


class WorkMatching:
    """Waiting work and the workers that ask for some or have some.

    Use it only in the event loop's thread.
    """

    def __init__(self) -> None:
        self.workers: dict[str, AskingWorker] = {}  # those with a poll or work
        self.records = WorkerRecords()
        self._waiting: deque[asyncio.Future[Poll]] = deque()
        self._waiting_alone: deque[asyncio.Future[Poll]] = deque()  # for a worker without others
        self._error: Exception | None = None

    def add_poll(self, worker: AskingWorker) -> Poll:
        """Return a new poll of a worker, which may be matched at once."""
        poll = Poll(worker, asyncio.get_running_loop().create_future())
        worker.polls.append(poll)
        self.dispatch()
        return poll

    def remove_poll(self, poll: Poll) -> None:
        """Remove a poll that nobody waits for any more, unless it was matched."""
        if poll in poll.worker.polls:
            poll.worker.polls.remove(poll)
            self.forget(poll.worker)

    def note(self, worker: AskingWorker, failure: str | None) -> None:
        """Note how work of a worker ended: the reason of its failure, or None."""
        has_others = any(w.num_held for w in self.workers.values() if w is not worker)
        now = time.monotonic()
        if delay_s := self.records.note(worker.name, failure, now, has_others=has_others):
            asyncio.get_running_loop().call_later(delay_s, self.dispatch)

    def fail(self, error: Exception) -> None:
        """Let everything that waits for a worker, now or later, raise the error."""
        self._error = error
        for waiting in (*self._waiting_alone, *self._waiting):
            if not waiting.done():
                waiting.set_exception(error)
        self._waiting_alone.clear()
        self._waiting.clear()

    async def match(self, *, alone: bool, first: bool = False) -> Poll:
        """Wait for a poll. The caller must answer or release it."""
        if self._error is not None:
            raise self._error
        waiting: asyncio.Future[Poll] = asyncio.get_running_loop().create_future()
        queue = self._waiting_alone if alone else self._waiting
        (queue.appendleft if first else queue.append)(waiting)
        self.dispatch()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.release(waiting.result())
            raise

    def dispatch(self) -> None:
        """Match what waits with the workers that have least to do."""
        reserved = self._dispatch_alone()
        while self._waiting:
            free = [w for w in self._free() if w.polls and w not in reserved]
            if not free:
                break
            self._assign(self._waiting.popleft(), min(free, key=_num_held))

    def _dispatch_alone(self) -> set[AskingWorker]:
        """Match work that must be alone. Return the workers that are reserved for it."""
        reserved: set[AskingWorker] = set()
        rest: deque[asyncio.Future[Poll]] = deque()
        for waiting in self._waiting_alone:
            free = [] if waiting.done() else [w for w in self._free() if w not in reserved]
            worker = min(free, key=_num_held, default=None)
            if worker is not None and worker.num_held == 0:
                worker.is_alone = True
                self._assign(waiting, worker)
            elif not waiting.done():
                rest.append(waiting)
                reserved.update([worker] if worker else [])
        self._waiting_alone = rest
        return reserved

    def _free(self) -> list[AskingWorker]:
        """Return the workers that may get work, now or once they ask."""
        now = time.monotonic()
        may_take = self.records.may_take
        return [
            worker
            for worker in self.workers.values()
            if not worker.is_alone and may_take(worker.name, worker.num_held, now)
        ]

    def _assign(self, waiting: asyncio.Future[Poll], worker: AskingWorker) -> None:
        """Match work with the worker's first poll, unless it was cancelled."""
        if waiting.done():
            return
        poll = worker.polls.popleft()
        worker.num_held += 1
        poll.is_matched = True
        waiting.set_result(poll)

    def release(self, poll: Poll) -> None:
        """Send a matched poll away without work."""
        self.let_go(poll.worker)
        if not poll.answer.done():
            poll.answer.set_result(None)

    def let_go(self, worker: AskingWorker) -> None:
        worker.num_held -= 1
        worker.is_alone = worker.is_alone and worker.num_held > 0
        self.forget(worker)
        self.dispatch()

    def forget(self, worker: AskingWorker) -> None:
        """Forget a worker that neither asks for work nor has some."""
        if not worker.polls and not worker.num_held and self.workers.get(worker.name) is worker:
            del self.workers[worker.name]

    def send_away(self, worker: AskingWorker) -> None:
        """Answer the polls of a worker without work."""
        while worker.polls:
            worker.polls.popleft().answer.set_result(None)
        self.forget(worker)


def _num_held(worker: AskingWorker) -> int:
    return worker.num_held
