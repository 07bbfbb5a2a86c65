"""Rollouts, spans and weights versions of one run, in one SQLite file that a crash does not break.

Writes are committed at once (WAL), so all that a killed process recorded is there when it resumes.
"""

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_jax.types import Rollout, RolloutStatus, Span, UserError

SCHEMA_VERSION = 2
METRICS_COLUMN = "metrics TEXT NOT NULL DEFAULT '{}'"  # since version 2
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS rollouts (
    rollout_id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    phase TEXT NOT NULL,
    step INTEGER NOT NULL,
    place INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    status TEXT NOT NULL,
    reward REAL,
    reason TEXT,
    detail TEXT,
    {METRICS_COLUMN}
);
CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id);
CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (phase, step);
CREATE TABLE IF NOT EXISTS spans (
    span_id TEXT NOT NULL,
    trace_id TEXT NOT NULL,
    parent_span_id TEXT,
    rollout_id TEXT,
    name TEXT NOT NULL,
    start_ns INTEGER NOT NULL,
    end_ns INTEGER NOT NULL,
    attributes TEXT NOT NULL,
    error TEXT,
    PRIMARY KEY (trace_id, span_id)
);
CREATE INDEX IF NOT EXISTS spans_by_rollout ON spans (rollout_id, start_ns);
CREATE TABLE IF NOT EXISTS weights_versions (
    version INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    time REAL NOT NULL
);
"""

# From each status, the ones that may follow. None is a rollout that is not in the store yet.
LEGAL_TRANSITIONS: dict[RolloutStatus | None, frozenset[RolloutStatus]] = {
    None: frozenset({"queued"}),
    "queued": frozenset({"running"}),
    "running": frozenset({"scored", "agent_failure", "infrastructure_failure"}),
    "scored": frozenset(),
    "agent_failure": frozenset(),
    "infrastructure_failure": frozenset(),
}

ROLLOUT_COLUMNS = (
    "rollout_id, task_id, group_id, phase, step, place, attempt, status, reward, reason, detail, "
    "metrics"
)
SPAN_COLUMNS = "trace_id, span_id, parent_span_id, name, start_ns, end_ns, attributes, error"


class StoreError(UserError, RuntimeError):
    """The store cannot do what was asked; the message is one sentence."""


class IllegalTransition(StoreError):
    """A rollout may not change from the status it has to the one asked for."""


@dataclass(frozen=True)
class WeightsVersion:
    """When which weights began to serve. `time_s` is seconds since the epoch."""

    version: int
    step: int
    time_s: float


class Store:
    """The SQLite file of one run. Any thread may call any method; each call is one transaction."""

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        """Opens the file, or makes it. Raises StoreError if it is not ours or cannot be written.

        `read_only` neither makes nor changes it, so it may belong to a run that goes on; a file of
        an older schema is read into memory and brought up to date there.
        """
        self.path = Path(path)
        self._lock = threading.Lock()
        if not self.path.parent.is_dir():
            raise StoreError(
                f"store {self.path} has no directory to lie in; create {self.path.parent} first."
            )
        where = f"{self.path.resolve().as_uri()}?mode=ro" if read_only else str(self.path)
        with _one_sentence(self.path):
            self._db = sqlite3.connect(where, timeout=30.0, check_same_thread=False, uri=read_only)
        try:
            if read_only:
                self._take_copy_if_old()
            else:
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        with _one_sentence(self.path):
            self._db.execute("PRAGMA journal_mode=WAL")
            # A killed process loses nothing; only a power cut may lose the last moments.
            self._db.execute("PRAGMA synchronous=NORMAL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, 1, SCHEMA_VERSION):
                raise StoreError(
                    f"store {self.path} has schema version {version}; expected {SCHEMA_VERSION}. "
                    "Use another run_dir, or the release that wrote it."
                )
            if version == 1:
                self._db.execute(f"ALTER TABLE rollouts ADD COLUMN {METRICS_COLUMN}")
            self._db.executescript(SCHEMA)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _take_copy_if_old(self) -> None:
        with _one_sentence(self.path):
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == SCHEMA_VERSION:
                return
            with contextlib.closing(self._db) as file:
                self._db = sqlite3.connect(":memory:", check_same_thread=False)
                file.backup(self._db)
        self._prepare()

    def close(self) -> None:
        """Ends the connection; calls after it raise StoreError. Closing twice is allowed."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, alone; what is done commits at the end, or rolls back on an exception."""
        with self._lock, _one_sentence(self.path), self._db:
            yield self._db

    # Rollouts

    def add_rollout(self, rollout: Rollout) -> None:
        """Records a new rollout, which must be queued. Raises ValueError if its id is taken."""
        _check_transition(rollout.rollout_id, None, rollout.status)
        row = (
            *(rollout.rollout_id, rollout.task_id, rollout.group_id, rollout.phase, rollout.step),
            *(rollout.index, rollout.attempt, rollout.status),
            *(rollout.reward, rollout.reason, rollout.detail, json.dumps(rollout.metrics)),
        )
        with self._transaction() as db:
            try:
                db.execute(f"INSERT INTO rollouts ({ROLLOUT_COLUMNS}) VALUES ({_marks(row)})", row)
            except sqlite3.IntegrityError as error:
                raise ValueError(
                    f"rollout {rollout.rollout_id!r} is in the store already; expected a new id. "
                    "Raise its attempt."
                ) from error

    def set_status(
        self,
        rollout_id: str,
        status: RolloutStatus,
        reward: float | None = None,
        reason: str | None = None,
        detail: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Moves a rollout on. Raises IllegalTransition, or ValueError where a part is missing.

        A scored rollout needs a reward, a failed one a reason code.
        """
        _check_result(rollout_id, status, reward, reason)
        with self._transaction() as db:
            row = db.execute(
                "SELECT status FROM rollouts WHERE rollout_id = ?", (rollout_id,)
            ).fetchone()
            if row is None:
                raise _unknown_rollout(rollout_id)
            _check_transition(rollout_id, row[0], status)
            db.execute(
                "UPDATE rollouts SET status = ?, reward = ?, reason = ?, detail = ?, metrics = ? "
                "WHERE rollout_id = ?",
                (status, reward, reason, detail, json.dumps(dict(metrics or {})), rollout_id),
            )

    def rollout(self, rollout_id: str) -> Rollout:
        """The rollout of that id. Raises StoreError when there is none."""
        with self._transaction() as db:
            row = db.execute(
                f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE rollout_id = ?", (rollout_id,)
            ).fetchone()
        if row is None:
            raise _unknown_rollout(rollout_id)
        return _rollout(row)

    def rollouts(
        self, *, phase: str | None = None, step: int | None = None, group_id: str | None = None
    ) -> list[Rollout]:
        """The rollouts that match what is given, by step, group, index and attempt."""
        where, values = _where(phase=phase, step=step, group_id=group_id)
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT {ROLLOUT_COLUMNS} FROM rollouts {where} "
                "ORDER BY step, group_id, place, attempt",
                values,
            ).fetchall()
        return [_rollout(row) for row in rows]

    def counts(self, *, phase: str | None = None, step: int | None = None) -> dict[str, int]:
        """How many rollouts have each status; a status that none has is left out."""
        return self._count("status", phase, step)

    def failure_counts(
        self, *, phase: str | None = None, step: int | None = None
    ) -> dict[str, int]:
        """How many failed rollouts give each reason code."""
        return self._count("reason", phase, step)

    def _count(self, column: str, phase: str | None, step: int | None) -> dict[str, int]:
        where, values = _where(phase=phase, step=step)
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT {column}, COUNT(*) FROM rollouts {where} "
                f"GROUP BY {column} ORDER BY {column}",
                values,
            ).fetchall()
        return {name: number for name, number in rows if name is not None}

    def abandon_running(self) -> int:
        """How many rollouts a crash left queued or running; they are infrastructure failures now.

        For a process that resumes a run, before it starts rollouts of its own.
        """
        with self._transaction() as db:
            return db.execute(
                "UPDATE rollouts SET status = 'infrastructure_failure', reason = 'crash', "
                "detail = 'the run ended while this rollout was ' || status "
                "WHERE status IN ('queued', 'running')"
            ).rowcount

    # Spans

    def add_span(self, rollout_id: str | None, span: Span, *, again: bool = False) -> None:
        """Records an ended span; `rollout_id` None is a call of no rollout. Ids must be new, unless
        `again` says that a span may be sent twice; then the first stays.
        """
        attributes = json.dumps(dict(span.attributes), separators=(",", ":"), ensure_ascii=False)
        row = (
            *(span.trace_id, span.span_id, span.parent_span_id, span.name),
            *(span.start_ns, span.end_ns, attributes, span.error, rollout_id),
        )
        with self._transaction() as db:
            try:
                db.execute(
                    f"INSERT INTO spans ({SPAN_COLUMNS}, rollout_id) VALUES ({_marks(row)})", row
                )
            except sqlite3.IntegrityError as error:
                if again:
                    return
                raise ValueError(
                    f"span {span.span_id!r} of trace {span.trace_id!r} is in the store already; "
                    "expected a new span id."
                ) from error

    def spans(self, rollout_id: str | None) -> list[Span]:
        """The spans of one rollout (None: of none) by start time; sequences come back as tuples."""
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT {SPAN_COLUMNS} FROM spans WHERE rollout_id IS ? ORDER BY start_ns, rowid",
                (rollout_id,),
            ).fetchall()
        return [_span(row) for row in rows]

    def failed_calls(self) -> list[tuple[str | None, int, str | None]]:
        """(reason, number, example) of calls to the policy that failed, the most frequent first.

        The example is a rollout's id, None for a call outside of rollouts.
        """
        with self._transaction() as db:
            return db.execute(
                "SELECT json_extract(attributes, '$.\"error.type\"') AS reason, "
                "COUNT(*) AS number, MIN(rollout_id) FROM spans WHERE error IS NOT NULL AND "
                "json_extract(attributes, '$.\"lightning.policy\"') IS NOT NULL "
                "GROUP BY reason ORDER BY number DESC, reason"
            ).fetchall()

    def num_calls(self) -> int:
        """Calls to the policy on record, failed ones too; the choices of one call are one."""
        with self._transaction() as db:
            (number,) = db.execute(
                "SELECT COUNT(*) FROM spans WHERE "
                "json_extract(attributes, '$.\"lightning.policy\"') IS NOT NULL AND "
                "json_extract(attributes, '$.\"lightning.choice_index\"') IS NULL"
            ).fetchone()
        return number

    # Weights

    def add_version(self, version: int, step: int, time_s: float | None = None) -> None:
        """Records that these weights began to serve. A resumed run may say it again."""
        moment = time.time() if time_s is None else time_s
        with self._transaction() as db:
            db.execute(
                "INSERT INTO weights_versions (version, step, time) VALUES (?, ?, ?) "
                "ON CONFLICT (version) DO UPDATE SET step = excluded.step, time = excluded.time",
                (version, step, moment),
            )

    def versions(self) -> list[WeightsVersion]:
        """The weights versions that served, oldest first."""
        with self._transaction() as db:
            rows = db.execute(
                "SELECT version, step, time FROM weights_versions ORDER BY version"
            ).fetchall()
        return [WeightsVersion(*row) for row in rows]


@contextlib.contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    """Turns whatever SQLite raises into a StoreError that says what to do."""
    remedies = {
        "SQLITE_FULL": "the disk is full; free some space, then start the run again",
        "SQLITE_NOTADB": "it is not a SQLite file; move it away or use another run_dir",
        "SQLITE_CORRUPT": "it is damaged; move it away or use another run_dir",
        "SQLITE_CANTOPEN": "it cannot be opened; check the path and its permissions",
        "SQLITE_READONLY": "it cannot be written; check its permissions",
        "SQLITE_BUSY": "another process holds its lock; stop the other run that uses this run_dir",
    }
    try:
        yield
    except sqlite3.Error as error:
        # Extended names, such as SQLITE_READONLY_DBMOVED, begin with the plain one.
        name = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
        remedy = remedies.get(name, "check the file and the disk it lies on")
        raise StoreError(f"store {path} failed ({error}): {remedy}.") from error


def _check_transition(rollout_id: str, old: RolloutStatus | None, new: RolloutStatus) -> None:
    legal = LEGAL_TRANSITIONS[old]
    if new not in legal:
        follow = " or ".join(sorted(legal)) or "nothing, for it has ended"
        raise IllegalTransition(
            f"rollout {rollout_id!r} may not go from {old or 'new'} to {new}; expected {follow}."
        )


def _check_result(
    rollout_id: str, status: RolloutStatus, reward: float | None, reason: str | None
) -> None:
    if status == "scored" and reward is None:
        raise ValueError(f"rollout {rollout_id!r} is scored without a reward; expected a number.")
    if status.endswith("_failure") and not reason:
        raise ValueError(f"rollout {rollout_id!r} fails without a reason; expected a short code.")


def _unknown_rollout(rollout_id: str) -> StoreError:
    return StoreError(f"rollout {rollout_id!r} is not in the store; add it with add_rollout first.")


def _where(**conditions: object) -> tuple[str, list[object]]:
    """The WHERE clause for the conditions that are not None, and their values."""
    given = {name: value for name, value in conditions.items() if value is not None}
    clause = " AND ".join(f"{name} = ?" for name in given)
    return (f"WHERE {clause}" if given else ""), list(given.values())


def _marks(row: tuple[object, ...]) -> str:
    return ", ".join("?" * len(row))


def _rollout(row: tuple[Any, ...]) -> Rollout:
    *fields, metrics = row
    return Rollout(*fields, metrics=json.loads(metrics))


def _span(row: tuple[Any, ...]) -> Span:
    *ids, attributes, error = row
    loaded = json.loads(attributes).items()
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in loaded}
    return Span(*ids, attributes=frozen, error=error)
