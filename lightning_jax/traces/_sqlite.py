"""SQLite file of a Store: its tables, its schema version, and errors that suggest a fix."""

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_jax.errors import UserError
from lightning_jax.system.files import create_private
from lightning_jax.system.text import in_one_line

SCHEMA_VERSION = 11
OLDEST_VERSION = 4  # of release 0.1.0
_VERSION = "PRAGMA user_version"
TASK_COLUMN = "task TEXT NOT NULL DEFAULT '{}'"  # since version 5: fields of the task, as texts
# Since version 7: rewards by component, and what judges wrote about them.
COMPONENTS_COLUMN = "components TEXT NOT NULL DEFAULT '{}'"
WORKER_COLUMN = "worker TEXT"  # since version 11
REASONS_COLUMN = "reasons TEXT NOT NULL DEFAULT '{}'"
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
    metrics TEXT NOT NULL DEFAULT '{{}}',
    -- 1: of another run; 2: of a failed run, which repeats them when it resumes.
    superseded INTEGER NOT NULL DEFAULT 0,
    {TASK_COLUMN},
    {COMPONENTS_COLUMN},
    {REASONS_COLUMN},
    {WORKER_COLUMN}
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
    sequence INTEGER -- NULL in spans of a store that began before version 4
);
CREATE INDEX IF NOT EXISTS spans_by_sequence ON spans (rollout_id, sequence);
-- Ids are unique within a rollout: one rollout cannot take another's by using them first. In stores
-- that began before version 4 the table's own key (trace_id, span_id) is unique as well.
CREATE UNIQUE INDEX IF NOT EXISTS spans_by_id ON spans (rollout_id, trace_id, span_id);
CREATE TABLE IF NOT EXISTS weights_versions (
    version INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    time REAL NOT NULL
);
-- Since version 6: ids of the groups that a step trained on, as a JSON list.
CREATE TABLE IF NOT EXISTS step_groups (
    step INTEGER PRIMARY KEY,
    group_ids TEXT NOT NULL
);
-- Since version 9: what a judge wrote, by the digest of all that it read and by whom it was for.
CREATE TABLE IF NOT EXISTS judge_verdicts (
    digest TEXT NOT NULL,
    asker TEXT NOT NULL,
    verdict TEXT NOT NULL,
    PRIMARY KEY (digest, asker)
);
-- Since version 8: groups that programs outside opened. Their tasks are nowhere else.
CREATE TABLE IF NOT EXISTS external_groups (
    group_id TEXT PRIMARY KEY,
    step INTEGER NOT NULL,
    name TEXT,
    task TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS external_groups_by_step ON external_groups (step);
-- Since version 10: those of them that a step dropped, because they were too old to train on.
CREATE TABLE IF NOT EXISTS dropped_groups (
    group_id TEXT PRIMARY KEY,
    step INTEGER NOT NULL
);
"""


# From version 7 to 8 a digest had one verdict, for whoever asked.
TAKE_OVER_VERDICTS = """
INSERT OR IGNORE INTO judge_verdicts SELECT digest, '', verdict FROM verdicts;
DROP TABLE verdicts;
"""


class StoreError(UserError, RuntimeError):
    """Failure of a store operation. The message is one sentence."""


class StoreFile:
    """Open file of a store. Any thread may call any method."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        """Open the file. See `open_file`."""
        self.path = path
        self._lock = threading.RLock()
        self._db = open_file(path, read_only=read_only)

    def close(self) -> None:
        """Close the connection. Later calls raise StoreError. Closing twice is allowed."""
        with self._lock:
            self._db.close()

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, one_sentence(self.path):
            return self._db.execute(query, values).fetchall()

    def _one(self, query: str, *values: object) -> Any:
        """Return the first value of a query, or None if it has no row."""
        return next((row[0] for row in self._rows(query, *values)), None)


def open_file(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Return a connection that any thread may use.

    `read_only` neither creates nor changes the file. A file with an older schema is then read into
    memory and migrated there. Raises StoreError.
    """
    if not path.parent.is_dir():
        raise StoreError.not_found(
            str(path.parent),
            f"the directory of store {path} does not exist; create {path.parent} first.",
        )
    if not read_only:  # SQLite gives its journals the mode of the file
        with contextlib.suppress(OSError):  # SQLite will report it
            create_private(path)
    with one_sentence(path):
        db = _read_only(path) if read_only else _connect(str(path))
    try:
        with one_sentence(path):
            (version,) = db.execute(_VERSION).fetchone()
            if read_only and version == SCHEMA_VERSION:
                return db
            if read_only:
                with contextlib.closing(db) as file:
                    db = sqlite3.connect(":memory:", check_same_thread=False)
                    file.backup(db)
            _bring_up_to_date(db, path, version)
    except BaseException:
        db.close()
        raise
    return db


def _connect(where: str, *, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(where, timeout=30.0, check_same_thread=False, uri=uri)


def _read_only(path: Path) -> sqlite3.Connection:
    """Return a connection that only reads.

    SQLite needs a file beside the store to read one with a journal. Where it cannot be written, as
    on a read-only mount, a store without a journal is read as it is, and one with a journal from a
    copy, whose files are deleted once they are open.
    """
    uri = path.resolve().as_uri()
    db = _connect(f"{uri}?mode=ro", uri=True)
    try:
        db.execute(_VERSION).fetchone()
        return db
    except sqlite3.Error as error:
        db.close()
        can_write = os.access(path.parent, os.W_OK)
        if not isinstance(error, sqlite3.OperationalError) or not path.is_file() or can_write:
            raise
    journal = path.with_name(f"{path.name}-wal")
    if not journal.is_file() or not journal.stat().st_size:
        return _connect(f"{uri}?mode=ro&immutable=1", uri=True)
    try:
        with tempfile.TemporaryDirectory(prefix="lightning_jax-") as folder:
            for file in (path, journal):
                shutil.copyfile(file, Path(folder) / file.name)
            db = _connect(f"{(Path(folder) / path.name).as_uri()}?mode=ro", uri=True)
            db.execute(_VERSION).fetchone()
    except OSError as error:
        raise StoreError(
            f"store {path} has a journal and is on a read-only disk, and cannot be copied to read "
            f"it ({error}); set TMPDIR to a directory with room.",
            reason="not_opened",
            key=str(path),
        ) from error
    return db


def _bring_up_to_date(db: sqlite3.Connection, path: Path, version: int) -> None:
    if version and not OLDEST_VERSION <= version <= SCHEMA_VERSION:
        raise StoreError.unsupported(
            "user_version",
            f"store {path} has schema version {version}; expected {OLDEST_VERSION} to "
            f"{SCHEMA_VERSION}. Use another run_dir, or the release that wrote it.",
        )
    db.execute("PRAGMA journal_mode=WAL")
    # A killed process loses nothing. A power cut may lose the last moments.
    db.execute("PRAGMA synchronous=NORMAL")
    for since, table, column in (
        (5, "rollouts", TASK_COLUMN),
        (7, "rollouts", COMPONENTS_COLUMN),
        (7, "rollouts", REASONS_COLUMN),
        (11, "rollouts", WORKER_COLUMN),
    ):
        if 0 < version < since:
            db.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    db.executescript(SCHEMA)
    if version in (7, 8):
        db.executescript(TAKE_OVER_VERDICTS)
    db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


@contextlib.contextmanager
def savepoint(db: sqlite3.Connection) -> Iterator[None]:
    """Undo all writes of the body if it fails, also within a larger transaction."""
    db.execute("SAVEPOINT body")
    try:
        yield
    except BaseException:
        if db.in_transaction:  # SQLite rolls back everything after some errors, as on a full disk
            db.execute("ROLLBACK TO body")
            db.execute("RELEASE body")
        raise
    db.execute("RELEASE body")


def parse(text: Any, kind: type) -> Any:
    """Return the JSON of a column. Raises StoreError if it is damaged."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged_value(error) from error
    if not isinstance(value, kind):
        raise _damaged_value(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _damaged_value(value: object) -> StoreError:
    return StoreError(
        f"the store has a value that is not what was written ({in_one_line(str(value))}): it is "
        "damaged; move it away or use another run_dir.",
        reason="malformed",
    )


@contextlib.contextmanager
def one_sentence(path: Path) -> Iterator[None]:
    """Convert SQLite errors to a StoreError that suggests a fix."""
    remedies = {
        "SQLITE_FULL": ("disk_full", "the disk is full; free some space, then start the run again"),
        "SQLITE_NOTADB": (
            "not_a_database",
            "it is not a SQLite file; move it away or use another run_dir",
        ),
        "SQLITE_CORRUPT": ("malformed", "it is damaged; move it away or use another run_dir"),
        "SQLITE_CANTOPEN": (
            "not_opened",
            "it cannot be opened; check the path and its permissions",
        ),
        "SQLITE_READONLY": ("not_writable", "it cannot be written; check its permissions"),
        "SQLITE_BUSY": (
            "locked",
            "another process holds its lock; stop the run that uses this run_dir",
        ),
    }
    try:
        yield
    except sqlite3.Error as error:
        # Extended names, such as SQLITE_READONLY_DBMOVED, begin with the plain one.
        name = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
        other = ("failed", "check the file and its disk")
        reason, remedy = remedies.get(name, other)
        message = f"store {path} failed ({error}): {remedy}."
        raise StoreError(message, reason=reason, key=str(path)) from error
    except UnicodeDecodeError as error:  # in a text of the file, or in SQLite's own message
        raise StoreError.malformed(
            str(path),
            f"store {path} failed ({error}): it is damaged; move it away or use another run_dir.",
        ) from error
