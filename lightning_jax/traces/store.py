"""Rollouts, spans and weights versions of one run, in one SQLite file that survives a crash.

A write is committed (WAL) before its caller goes on, so a resumed process finds all that a killed
one had answered. Writes that wait on the store's thread are committed together: each commit, and
each statement, hands the interpreter lock over several times.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pydantic_core import to_json

from lightning_jax.errors import InvalidValue
from lightning_jax.system.files import FileIdentity
from lightning_jax.traces._groups import GroupThread, Job
from lightning_jax.traces._sqlite import (
    StoreError,
    last_sequence,
    one_sentence,
    open_file,
    parse,
    savepoint,
)
from lightning_jax.traces.context import flush_process_tracer
from lightning_jax.traces.tasks import shorten_task
from lightning_jax.types import Rollout, RolloutStatus, Span, Task

# Allowed next statuses of each status. None: not in the store yet.
LEGAL_TRANSITIONS: dict[RolloutStatus | None, frozenset[RolloutStatus]] = {
    None: frozenset({"queued"}),
    "queued": frozenset({"running", "stopped"}),
    "running": frozenset({"scored", "agent_failure", "infrastructure_failure", "stopped"}),
    "scored": frozenset(),
    "agent_failure": frozenset(),
    "infrastructure_failure": frozenset(),
    "stopped": frozenset(),
}

# Reasons of stopped rollouts: their run was asked to stop, or its process was killed.
STOP, CRASH = "stop", "crash"

ROLLOUT_COLUMNS = (
    "rollout_id, task_id, group_id, phase, step, place, attempt, status, reward, reason, detail, "
    "metrics, superseded, components, worker"
)
SPAN_COLUMNS = (
    "trace_id, span_id, parent_span_id, name, start_ns, end_ns, attributes, error, sequence"
)
MAX_ROWS = 99  # of a statement: some builds of SQLite allow 999 variables


P = ParamSpec("P")
T = TypeVar("T")


class IllegalTransition(StoreError):
    """Change of a rollout's status that is not allowed."""


@dataclass(frozen=True)
class WeightsVersion:
    """Start of serving of one weights version. `time_s` is in seconds since the epoch."""

    version: int
    step: int
    time_s: float


@dataclass(frozen=True)
class ExternalGroup:
    """Group that a program outside opened, as stored. `index` counts the groups of its step."""

    group_id: str
    step: int
    index: int
    name: str | None
    task: Task


class Store:
    """SQLite file of one run. Any thread may call any method; each call is one transaction.

    A call waits while another process holds the file's lock. On an event loop use `in_order`, which
    does not block the loop.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        """Open the file, or create it. Raises StoreError if it is invalid or not writable.

        `read_only` neither creates nor changes the file, so a run may be using it. A file with an
        older schema is then read into memory and migrated there.
        """
        self.path = Path(path)
        self._lock = threading.RLock()
        self._db = open_file(self.path, read_only=read_only)
        self._begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"
        # A file that is deleted while it is open takes writes that nobody will find.
        self._written = None if read_only else FileIdentity.of(self.path)
        self._in_group = False  # under the lock
        self._thread = GroupThread(self._run_group)
        try:
            last = 0 if read_only else last_sequence(self._db, self.path)
        except BaseException:
            self._db.close()
            raise
        self._sequence = itertools.count(last + 1)

    def close(self) -> None:
        """Close the connection after the pending `in_order` and `record` calls.

        Later calls raise StoreError. Closing twice is allowed.
        """
        self._thread.close()
        with self._lock:
            self._db.close()

    async def in_order(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function on the store's own thread, after earlier ones, and return its result.

        Its writes are committed then. A cancelled caller does not wait, but the function still
        runs.
        """
        return await self._grouped(function=partial(function, *args, **kwargs))

    async def record(self, rollout_id: str | None, *spans: Span) -> None:
        """Add spans like `add_span`, on the store's own thread. Return once they are committed.

        Spans are written before the functions of `in_order` that wait beside them.
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
        if self._written is not None and not self._written.is_at(self.path):
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
        rows: list[tuple[Any, ...]] = []
        sound: list[tuple[Job, list[tuple[Any, ...]]]] = []
        for job in jobs:
            try:
                sound.append((job, [self._row(job.rollout_id, span) for span in job.spans]))
                rows += sound[-1][1]
            except (TypeError, ValueError) as error:  # an attribute that is not JSON
                job.error = error
        try:
            _insert_spans(self._db, rows)
        except sqlite3.Error:  # perhaps of one job only
            for job, job_rows in sound:
                job.run(partial(self._add_rows, job_rows))
                self._check_open(job)

    def _check_open(self, job: Job) -> None:
        """Raise the job's error if SQLite has rolled back the whole transaction because of it."""
        if isinstance(job.error, StoreError) and not self._db.in_transaction:
            raise job.error

    # Rollouts

    def add_rollout(self, rollout: Rollout, task: Task | None = None) -> None:
        """Add a new rollout, which must be queued. Raises ValueError if its id is taken.

        The fields of its task are kept for `task_fields`.
        """
        _check_transition(rollout.rollout_id, None, rollout.status)
        row = (
            *(rollout.rollout_id, rollout.task_id, rollout.group_id, rollout.phase, rollout.step),
            *(rollout.index, rollout.attempt, rollout.status),
            *(rollout.reward, rollout.reason, rollout.detail, json.dumps(rollout.metrics)),
            *(rollout.superseded, json.dumps(rollout.components), rollout.worker),
            json.dumps(shorten_task(task or {})),
        )
        with self._transaction() as db:
            try:
                db.execute(
                    f"INSERT INTO rollouts ({ROLLOUT_COLUMNS}, task) VALUES ({marks(row)})", row
                )
            except sqlite3.IntegrityError as error:
                raise InvalidValue(
                    f"rollout {rollout.rollout_id!r} is already in the store; raise its attempt.",
                    reason="duplicate",
                    key=rollout.rollout_id,
                ) from error

    def set_status(
        self,
        rollout_id: str,
        status: RolloutStatus,
        reward: float | None = None,
        reason: str | None = None,
        detail: str | None = None,
        metrics: Mapping[str, float] | None = None,
        worker: str | None = None,
    ) -> None:
        """Change a rollout's status. Raises IllegalTransition, or ValueError if a value is missing.

        A scored rollout needs a reward, a failed or stopped one a reason code.
        """
        _check_result(rollout_id, status, reward, reason)
        with self._transaction() as db:
            old = [name for name, legal in LEGAL_TRANSITIONS.items() if name and status in legal]
            changed = db.execute(
                "UPDATE rollouts SET status = ?, reward = ?, reason = ?, detail = ?, metrics = ?, "
                f"worker = ? WHERE rollout_id = ? AND status IN ({marks(old)})",
                (
                    *(status, reward, reason, detail, json.dumps(dict(metrics or {}))),
                    *(worker, rollout_id, *old),
                ),
            ).rowcount
            if not changed:
                query = "SELECT status FROM rollouts WHERE rollout_id = ?"
                row = db.execute(query, (rollout_id,)).fetchone()
                if row is None:
                    raise _unknown_rollout(rollout_id)
                _check_transition(rollout_id, row[0], status)

    def set_scores(
        self, rollouts: Sequence[Rollout], reasons: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Replace the results of finished rollouts by those of their reward components.

        `reasons` are texts of judges by rollout id and component.
        """
        rows = [
            (
                *(rollout.status, rollout.reward, rollout.reason, rollout.detail),
                json.dumps(rollout.components),
                json.dumps(dict(reasons.get(rollout.rollout_id, {})), ensure_ascii=False),
                rollout.rollout_id,
            )
            for rollout in rollouts
        ]
        with self._transaction() as db:
            db.executemany(
                "UPDATE rollouts SET status = ?, reward = ?, reason = ?, detail = ?, "
                "components = ?, reasons = ? WHERE rollout_id = ?",
                rows,
            )

    def reasons(self, rollout_id: str) -> dict[str, str]:
        """Return what judges wrote about the rollout, by component. The texts are untrusted."""
        with self._transaction() as db:
            query = "SELECT reasons FROM rollouts WHERE rollout_id = ?"
            row = db.execute(query, (rollout_id,)).fetchone()
        return parse(row[0], dict) if row else {}

    def forget_scores(self, step: int, group_ids: Sequence[str] = ()) -> None:
        """Give rollouts of this step and later ones, and of the groups, the agent's reward again.

        Only rollouts that reward components scored change.
        """
        query = (
            "UPDATE rollouts SET reward = json_extract(components, '$.agent'), components = '{}', "
            "reasons = '{}' WHERE json_extract(components, '$.agent') IS NOT NULL AND "
        )
        with self._transaction() as db:
            db.execute(f"{query} step >= ?", (step,))
            db.executemany(f"{query} group_id = ?", [(group_id,) for group_id in group_ids])

    def verdicts(self, digest: str) -> dict[str, str]:
        """Return the judge's answers on the text with that digest, by asker, the first one first.

        The asker "" is of a store from before verdicts had askers.
        """
        with self._transaction() as db:
            query = "SELECT asker, verdict FROM judge_verdicts WHERE digest = ? ORDER BY rowid"
            return dict(db.execute(query, (digest,)).fetchall())

    def add_verdict(self, digest: str, asker: str, verdict: str) -> None:
        """Keep a judge's answer. The first one for a digest and an asker stays."""
        with self._transaction() as db:
            row = (digest, asker, verdict)
            db.execute("INSERT OR IGNORE INTO judge_verdicts VALUES (?, ?, ?)", row)

    def rollout(self, rollout_id: str) -> Rollout:
        """Return the rollout with that id. Raises StoreError if there is none."""
        with self._transaction() as db:
            row = db.execute(
                f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE rollout_id = ?", (rollout_id,)
            ).fetchone()
        if row is None:
            raise _unknown_rollout(rollout_id)
        return as_rollout(row)

    def task_fields(self, rollout_id: str) -> dict[str, str]:
        """Return the fields of the rollout's task as texts, or {} if they were not recorded."""
        with self._transaction() as db:
            query = "SELECT task FROM rollouts WHERE rollout_id = ?"
            row = db.execute(query, (rollout_id,)).fetchone()
        return parse(row[0], dict) if row else {}

    def rollouts(
        self, *, phase: str | None = None, step: int | None = None, group_id: str | None = None
    ) -> list[Rollout]:
        """Return the matching rollouts, sorted by step, group, index and attempt."""
        where, values = _where(phase=phase, step=step, group_id=group_id)
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT {ROLLOUT_COLUMNS} FROM rollouts {where} "
                "ORDER BY step, group_id, place, attempt",
                values,
            ).fetchall()
        return [as_rollout(row) for row in rows]

    def next_step(self, phase: str) -> int:
        """Return the first step of which no rollout of the phase is stored, nor of a later one."""
        with self._transaction() as db:
            query = "SELECT coalesce(max(step), -1) + 1 FROM rollouts WHERE phase = ?"
            return db.execute(query, (phase,)).fetchone()[0]

    def abandon_running(self, reason: str, rollout_id: str | None = None) -> int:
        """Mark queued and running rollouts, or only that one, as stopped. Return their number.

        `reason` is STOP, or CRASH when resuming, before new rollouts start.
        """
        with self._transaction() as db:
            return db.execute(
                "UPDATE rollouts SET status = 'stopped', reason = ?1, "
                "detail = 'the run ended while this rollout was ' || status "
                "WHERE status IN ('queued', 'running') AND (?2 IS NULL OR rollout_id = ?2)",
                (reason, rollout_id),
            ).rowcount

    def supersede(self, step: int, group_ids: Sequence[str] = ()) -> None:
        """Mark the rollouts of this step and later ones, and of the groups, as of another run.

        They stay in the store but are not reused by this run.
        """
        with self._transaction() as db:
            db.execute("UPDATE rollouts SET superseded = 1 WHERE step >= ?", (step,))
            db.executemany(
                "UPDATE rollouts SET superseded = 1 WHERE group_id = ?",
                [(group_id,) for group_id in group_ids],
            )
            db.execute("DELETE FROM step_groups WHERE step >= ?", (step,))

    def mark_for_repeat(self, step: int) -> None:
        """Mark the rollouts of this step and later ones, which `supersede_marked` supersedes.

        Until then they are listed, so that a failed run shows what failed.
        """
        with self._transaction() as db:
            query = "UPDATE rollouts SET superseded = 2 WHERE step >= ? AND superseded = 0"
            db.execute(query, (step,))

    def supersede_marked(self) -> None:
        """Supersede the steps that `mark_for_repeat` marked, before a run repeats them."""
        with self._transaction() as db:
            query = "SELECT MIN(step) FROM rollouts WHERE superseded = 2"
            (step,) = db.execute(query).fetchone()
            if step is not None:
                self.supersede(step)

    def set_step_groups(self, step: int, group_ids: Sequence[str]) -> None:
        """Record the groups that a step trains on. A resumed run may repeat this."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO step_groups (step, group_ids) VALUES (?, ?) "
                "ON CONFLICT (step) DO UPDATE SET group_ids = excluded.group_ids",
                (step, json.dumps(list(group_ids))),
            )

    def step_groups(self, step: int) -> list[str]:
        """Return the ids of the groups that a step trained on, or [] if none is recorded."""
        with self._transaction() as db:
            query = "SELECT group_ids FROM step_groups WHERE step = ?"
            row = db.execute(query, (step,)).fetchone()
        return parse(row[0], list) if row else []

    def all_step_groups(self) -> dict[int, list[str]]:
        """Return the ids of the groups of each recorded step, by step."""
        with self._transaction() as db:
            rows = db.execute("SELECT step, group_ids FROM step_groups ORDER BY step").fetchall()
        return {step: parse(group_ids, list) for step, group_ids in rows}

    def step_of_group(self, group_id: str) -> int | None:
        """Return the step that trained on the group, or None if none is recorded."""
        with self._transaction() as db:
            query = "SELECT step FROM step_groups, json_each(group_ids) WHERE json_each.value = ?"
            row = db.execute(query, (group_id,)).fetchone()
        return row[0] if row else None

    def add_external_group(self, group_id: str, step: int, name: str | None, task: Task) -> None:
        """Record a group that a program outside opened in this step, with its whole task.

        A group that is known stays as it is.
        """
        with self._transaction() as db:
            db.execute(
                "INSERT INTO external_groups (group_id, step, name, task) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (group_id, step, name, json.dumps(task)),
            )

    def drop_external_groups(self, step: int, group_ids: Sequence[str]) -> None:
        """Record the groups that this step dropped. A resumed run may repeat this."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO dropped_groups (group_id, step) VALUES (?, ?)",
                [(group_id, step) for group_id in group_ids],
            )

    def external_groups(self, first: int, step: int) -> list[ExternalGroup]:
        """Return the groups, in order, that were opened in the steps from `first` to `step`.

        Groups that a step before `step` took, or one up to `step` dropped, are left out.
        """
        with self._transaction() as db:
            rows = db.execute(
                "SELECT group_id, step, place, name, task FROM (SELECT *, rowid AS row, "
                "row_number() OVER (PARTITION BY step ORDER BY rowid) - 1 AS place "
                "FROM external_groups WHERE step BETWEEN ?1 AND ?2) "
                "WHERE group_id NOT IN (SELECT value FROM step_groups, json_each(group_ids) "
                "WHERE step_groups.step < ?2) "
                "AND group_id NOT IN (SELECT group_id FROM dropped_groups WHERE step <= ?2) "
                "ORDER BY row",
                (first, step),
            ).fetchall()
        return [ExternalGroup(*row[:4], task=parse(row[4], dict)) for row in rows]

    # Spans

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

    def _add_rows(self, rows: Sequence[tuple[Any, ...]]) -> None:
        with self._transaction() as db:
            try:
                _insert_spans(db, rows)
            except sqlite3.IntegrityError as error:
                trace_id, span_id, *_ = _first_duplicate(db, rows)
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
                is_new = db.execute(f"{_add_spans(1)} ON CONFLICT DO NOTHING", row).rowcount == 1
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
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT {SPAN_COLUMNS} FROM spans WHERE rollout_id IS ? "
                "ORDER BY sequence, start_ns, rowid",
                (rollout_id,),
            ).fetchall()
        return [_span(row) for row in rows]

    def _row(self, rollout_id: str | None, span: Span) -> tuple[Any, ...]:
        # Several times as fast as `json`, which would hold the interpreter lock for as long.
        attributes = to_json(dict(span.attributes), inf_nan_mode="constants").decode()
        sequence = self.next_sequence() if span.sequence is None else span.sequence
        return (
            *(span.trace_id, span.span_id, span.parent_span_id, span.name),
            *(span.start_ns, span.end_ns, attributes, span.error, sequence, rollout_id),
        )

    def failed_calls(self) -> list[tuple[str | None, int, str | None]]:
        """Return (reason, number, example) of failed calls to the policy, most frequent first.

        The example is a rollout id, or None for a call outside rollouts.
        """
        with self._transaction() as db:
            return db.execute(
                "SELECT json_extract(attributes, '$.\"error.type\"') AS reason, "
                "COUNT(*) AS number, MIN(rollout_id) FROM spans WHERE error IS NOT NULL AND "
                "json_extract(attributes, '$.\"lightning.policy\"') IS NOT NULL "
                "GROUP BY reason ORDER BY number DESC, reason"
            ).fetchall()

    def num_calls(self) -> int:
        """Return the number of recorded calls to the policy, including failed ones.

        Several choices of one call count once.
        """
        with self._transaction() as db:
            (number,) = db.execute(
                "SELECT COUNT(*) FROM spans WHERE "
                "json_extract(attributes, '$.\"lightning.policy\"') IS NOT NULL AND "
                "json_extract(attributes, '$.\"lightning.choice_index\"') IS NULL"
            ).fetchone()
        return number

    # Weights

    def add_version(self, version: int, step: int, time_s: float | None = None) -> None:
        """Record that these weights began to serve. A resumed run may repeat this."""
        moment = time.time() if time_s is None else time_s
        with self._transaction() as db:
            db.execute(
                "INSERT INTO weights_versions (version, step, time) VALUES (?, ?, ?) "
                "ON CONFLICT (version) DO UPDATE SET step = excluded.step, time = excluded.time",
                (version, step, moment),
            )

    def versions(self) -> list[WeightsVersion]:
        """Return the weights versions that served, oldest first."""
        with self._transaction() as db:
            rows = db.execute(
                "SELECT version, step, time FROM weights_versions ORDER BY version"
            ).fetchall()
        return [WeightsVersion(*row) for row in rows]


class TemporaryStore(Store):
    """Store in a directory of its own. `close` deletes the directory, at the latest at exit."""

    def __init__(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="lightning_jax-"))
        try:
            super().__init__(directory / "store.sqlite")
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._written = None  # nobody will look for it
        self._delete = weakref.finalize(self, _delete_store, self._db, directory)

    def close(self) -> None:
        super().close()
        self._delete()


def _delete_store(db: sqlite3.Connection, directory: Path) -> None:
    """Close a forgotten store and delete its files. Python 3.13 warns of a connection left open."""
    db.close()
    shutil.rmtree(directory, ignore_errors=True)


def _check_transition(rollout_id: str, old: RolloutStatus | None, new: RolloutStatus) -> None:
    legal = LEGAL_TRANSITIONS[old]
    if new not in legal:
        follow = " or ".join(sorted(legal)) or "no change, because it has finished"
        raise IllegalTransition(
            f"rollout {rollout_id!r} may not go from {old or 'new'} to {new}; expected {follow}.",
            reason="illegal_transition",
            key=rollout_id,
        )


def _check_result(
    rollout_id: str, status: RolloutStatus, reward: float | None, reason: str | None
) -> None:
    if status == "scored" and reward is None:
        raise InvalidValue(
            f"rollout {rollout_id!r} is scored without a reward; expected a number.",
            reason="missing",
            key="reward",
        )
    if (status.endswith("_failure") or status == "stopped") and not reason:
        raise InvalidValue(
            f"rollout {rollout_id!r} ends without a reason; expected a short code.",
            reason="missing",
            key="reason",
        )


def _unknown_rollout(rollout_id: str) -> StoreError:
    return StoreError(
        f"rollout {rollout_id!r} is not in the store; add it with add_rollout first.",
        reason="unknown",
        key=rollout_id,
    )


def _where(**conditions: object) -> tuple[str, list[object]]:
    """Return a WHERE clause for the conditions that are not None, and their values."""
    values = {name: value for name, value in conditions.items() if value is not None}
    clause = " AND ".join(f"{name} = ?" for name in values)
    return (f"WHERE {clause}" if values else ""), list(values.values())


def marks(row: Sequence[object]) -> str:
    """Return SQL's placeholders for some values."""
    return ", ".join("?" * len(row))


@functools.cache
def _add_spans(number: int) -> str:
    """Return a statement that adds this many spans, all or none."""
    rows = ", ".join([f"({', '.join('?' * 10)})"] * number)
    return f"INSERT INTO spans ({SPAN_COLUMNS}, rollout_id) VALUES {rows}"


def _insert_spans(db: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Add all rows or none, in as few statements as possible."""
    parts = [rows[start : start + MAX_ROWS] for start in range(0, len(rows), MAX_ROWS)]
    with savepoint(db) if len(parts) > 1 else contextlib.nullcontext():
        for part in parts:
            db.execute(_add_spans(len(part)), list(itertools.chain.from_iterable(part)))


def _first_duplicate(db: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the first row whose ids another span has."""
    seen = set()
    for row in rows:
        trace_id, span_id, *_, rollout_id = row
        query = "SELECT 1 FROM spans WHERE rollout_id IS ? AND trace_id = ? AND span_id = ?"
        if (trace_id, span_id) in seen or db.execute(
            query, (rollout_id, trace_id, span_id)
        ).fetchone():
            return row
        seen.add((trace_id, span_id))
    return rows[-1]  # a store from before version 4, in which all rollouts share their ids


def as_rollout(row: tuple[Any, ...]) -> Rollout:
    """Return the rollout in a row of ROLLOUT_COLUMNS."""
    *fields, metrics, superseded, components, worker = row
    return Rollout(
        *fields,
        metrics=parse(metrics, dict),
        superseded=superseded == 1,
        components=parse(components, dict),
        worker=worker,
    )


def _span(row: tuple[Any, ...]) -> Span:
    *ids, attributes, error, sequence = row
    loaded = parse(attributes, dict).items()
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in loaded}
    return Span(*ids, attributes=frozen, error=error, sequence=sequence)
