"""Record of how the rollouts of each worker ended. A worker that fails alone gets less work."""

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

WINDOW = 50  # rollouts of each worker that count
MIN_IN_ROW = 3  # failures before a worker is judged
FIRST_SHARE = 0.25  # of failures that is expected before others have ended a rollout
MAX_CHANCE = 1e-3  # below it, a row of failures is the worker's own fault
MAX_DELAY_S = 60.0  # before such a worker gets another rollout
MAX_WORKERS = 1000  # that are remembered


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
        delay_s = min(2.0**record.num_delays, MAX_DELAY_S)
        record.num_delays += 1
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
