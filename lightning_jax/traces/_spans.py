"""Spans of a store's file. All spans that wait when its thread is free are written as one group.

Each commit, and each statement, hands the interpreter lock over several times.
"""

import asyncio
import contextlib
import itertools
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from lightning_jax.errors import InvalidValue
from lightning_jax.system.files import FileIdentity
from lightning_jax.traces._sqlite import StoreError, StoreFile, one_sentence, savepoint
from lightning_jax.traces.context import flush_process_tracer
from lightning_jax.traces.rows import (
    MAX_ROWS,
    SPAN_COLUMNS,
    Row,
    add_spans,
    as_span,
    first_duplicate,
    insert_spans,
    marks,
    span_row,
)
from lightning_jax.types import Span

# A group ends in one turn of the event loop, which is then busy with the answers of all its calls.
MAX_GROUP = 64

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Job:
    """Function to run in a group, or spans to add, and the future of its result."""

    future: asyncio.Future[Any]
    function: Callable[[], Any] | None = None
    rollout_id: str | None = None  # of the spans
    spans: Sequence[Span] = ()
    result: Any = None
    error: BaseException | None = None

    def run(self, function: Callable[[], Any]) -> None:
        """Call the function and keep its result or error."""
        try:
            self.result = function()
        except BaseException as error:  # noqa: BLE001  (raised again in the waiting caller)
            self.error = error

    def resolve(self) -> None:
        """Give the result to the caller, unless it was cancelled. For the event loop's thread."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class GroupThread:
    """Thread that takes jobs in their order, at most MAX_GROUP at once.

    `run_group` sets their results and errors.
    """

    def __init__(self, run_group: Callable[[Sequence[Job]], None]) -> None:
        self._run_group = run_group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._is_busy = False

    def add(self, job: Job) -> None:
        """Add a job. Raise RuntimeError after `close`."""
        with self._lock:
            if not self._is_busy:
                self._thread.submit(self._run)
                self._is_busy = True
            self._waiting.append(job)

    def close(self) -> None:
        """Return once the waiting jobs have run."""
        self._thread.shutdown()

    def _run(self) -> None:
        while group := self._take():
            self._run_group(group)
            loops = {job.future.get_loop() for job in group}
            for loop in loops:
                jobs = [job for job in group if job.future.get_loop() is loop]
                with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
                    loop.call_soon_threadsafe(lambda jobs=jobs: [job.resolve() for job in jobs])

    def _take(self) -> list[Job]:
        """Return the next group, or [] if no job waits."""
        with self._lock:
            number = min(len(self._waiting), MAX_GROUP)
            self._is_busy = number > 0
            return [self._waiting.popleft() for _ in range(number)]


class SpanFile(StoreFile):
    """Store's file with its spans, and a thread that commits together what waits to be written."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        super().__init__(path, read_only=read_only)
        self._begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"
        # A file that is deleted while it is open takes writes that nobody will find.
        self._identity = None if read_only else FileIdentity.of(path)
        self._in_group = False  # under the lock
        self._thread = GroupThread(self._run_group)
        try:
            highest = None if read_only else self._one("SELECT MAX(sequence) FROM spans")
        except BaseException:
            self._db.close()
            raise
        self._sequence = itertools.count(1 + (highest or 0))

    def close(self) -> None:
        """Close the connection after the pending `in_order` and `record` calls.

        Later calls raise StoreError. Closing twice is allowed.
        """
        self._thread.close()
        super().close()

    async def in_order(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function on the store's own thread, after earlier ones, and return its result.

        Its writes are committed then. A cancelled caller does not wait, but the function still
        runs.
        """
        return await self._grouped(function=partial(function, *args, **kwargs))

    async def record(self, rollout_id: str | None, *spans: Span) -> None:
        """Add spans like `add_span`, on the store's own thread. Return once they are committed.

        Waiting spans are written before waiting functions of `in_order`.
        """
        await self._grouped(rollout_id=rollout_id, spans=spans)

    async def wait_for_spans(self) -> None:
        """Return once all spans are stored that have ended, also in this process's own tracer."""
        await asyncio.to_thread(flush_process_tracer)
        await self.in_order(lambda: None)  # wait for pending writes

    async def _grouped(self, **job: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        try:
            self._thread.add(Job(future, **job))
        except RuntimeError as error:
            raise StoreError(
                f"store {self.path} is closed; open it again.", reason="closed", key=str(self.path)
            ) from error
        return await future

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield the locked connection. Commit at the end, or roll back after an exception.

        In a group, leave both to the group. A failed statement then changes nothing by itself; a
        method with several that write needs a `savepoint`.
        """
        with self._lock, one_sentence(self.path):
            if self._in_group:
                yield self._db
            else:
                self._check_present()
                with self._db:
                    yield self._db

    def _check_present(self) -> None:
        """Raise StoreError if the file was deleted or replaced since it was opened to write."""
        if self._identity is not None and not self._identity.is_at(self.path):
            raise StoreError(
                f"store {self.path} was deleted or replaced while the run wrote to it, and what it "
                "writes now would be lost; restore it, or start again in another run_dir.",
                reason="deleted",
                key=str(self.path),
            )

    def _run_group(self, jobs: Sequence[Job]) -> None:
        """Run the jobs in one transaction. If it cannot be committed, all have its error."""
        with self._lock:
            try:
                with one_sentence(self.path), self._db:
                    self._check_present()
                    self._db.execute(self._begin)
                    self._in_group = True
                    self._add_spans_of([job for job in jobs if job.function is None])
                    for job in jobs:
                        if job.function is not None:
                            job.run(job.function)
                            self._check_open(job)
            except StoreError as error:
                for job in jobs:
                    job.error = error
            finally:
                self._in_group = False

    def _add_spans_of(self, jobs: Sequence[Job]) -> None:
        rows: list[Row] = []
        sound: list[tuple[Job, list[Row]]] = []
        for job in jobs:
            try:
                sound.append((job, [self._row(job.rollout_id, span) for span in job.spans]))
                rows += sound[-1][1]
            except (TypeError, ValueError) as error:  # an attribute that is not JSON
                job.error = error
        try:
            insert_spans(self._db, rows)
        except sqlite3.Error:  # perhaps of one job only
            for job, job_rows in sound:
                job.run(partial(self._add_rows, job_rows))
                self._check_open(job)

    def _check_open(self, job: Job) -> None:
        """Raise the job's error if SQLite has rolled back the whole transaction because of it."""
        if isinstance(job.error, StoreError) and not self._db.in_transaction:
            raise job.error

    def next_sequence(self) -> int:
        """Return the next sequence number, for a span that begins now and is recorded later.

        Sequence numbers order spans by their start. The wall clock does not, because it may be set
        back.
        """
        return next(self._sequence)

    def add_span(self, rollout_id: str | None, *spans: Span) -> None:
        """Add ended spans, all or none. `rollout_id` is None if they are outside rollouts.

        Raises ValueError if the rollout has a span with the same ids.
        """
        self._add_rows([self._row(rollout_id, span) for span in spans])

    def _add_rows(self, rows: Sequence[Row]) -> None:
        with self._transaction() as db:
            try:
                insert_spans(db, rows)
            except sqlite3.IntegrityError as error:
                trace_id, span_id, *_ = first_duplicate(db, rows)
                raise InvalidValue(
                    f"span {span_id!r} of trace {trace_id!r} is already in the store; use a new "
                    "span id.",
                    reason="duplicate",
                    key=span_id,
                ) from error

    def add_posted_spans(self, rollout_id: str, spans: Sequence[Span]) -> tuple[list[bool], int]:
        """Add spans whose ids a client chose, and which it may send twice.

        Return (which spans are new, the number of spans whose ids are those of a different recorded
        span). The recorded span stays as it is.
        """
        are_new: list[bool] = []
        num_taken = 0
        rows = [self._row(rollout_id, span) for span in spans]
        with self._transaction() as db, savepoint(db):
            for row in rows:
                is_new = db.execute(f"{add_spans(1)} ON CONFLICT DO NOTHING", row).rowcount == 1
                are_new.append(is_new)
                if not is_new:
                    trace_id, span_id, *_ = row
                    recorded = db.execute(
                        f"SELECT {SPAN_COLUMNS} FROM spans "
                        "WHERE rollout_id = ? AND trace_id = ? AND span_id = ?",
                        (rollout_id, trace_id, span_id),
                    ).fetchone()
                    num_taken += recorded is None or recorded[:-1] != row[:-2]
        return are_new, num_taken

    async def record_posted(self, rollout_id: str, spans: Sequence[Span]) -> tuple[list[bool], int]:
        """Return what `add_posted_spans` returns, once it has stored the spans."""
        return await self.in_order(self.add_posted_spans, rollout_id, spans)

    def spans(self, rollout_id: str | None) -> list[Span]:
        """Return the spans of one rollout (None: outside rollouts) in the order of their start.

        A span posted by an agent is ordered by its arrival. Lists in attributes are returned as
        tuples.
        """
        where = "WHERE rollout_id IS ? ORDER BY sequence, start_ns, rowid"
        rows = self._rows(f"SELECT {SPAN_COLUMNS} FROM spans {where}", rollout_id)
        return [as_span(row) for row in rows]

    def num_spans(self, rollout_ids: Sequence[str]) -> dict[str, int]:
        """Return the number of spans of each rollout that has any."""
        numbers: dict[str, int] = {}
        for start in range(0, len(rollout_ids), MAX_ROWS):
            part = rollout_ids[start : start + MAX_ROWS]
            query = "SELECT rollout_id, COUNT(*) FROM spans WHERE rollout_id IN "
            numbers |= self._rows(f"{query}({marks(part)}) GROUP BY rollout_id", *part)
        return numbers

    def _row(self, rollout_id: str | None, span: Span) -> Row:
        sequence = self.next_sequence() if span.sequence is None else span.sequence
        return span_row(rollout_id, span, sequence)
