"""Rollouts, spans and weights versions of one run, in one SQLite file that survives a crash.

A write is committed (WAL) before its caller goes on, so a resumed process finds all that a killed
one had answered.
"""

import json
import shutil
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_jax.errors import InvalidValue
from lightning_jax.traces._spans import SpanFile
from lightning_jax.traces._sqlite import StoreError, parse
from lightning_jax.traces.rows import ROLLOUT_COLUMNS, as_rollout, marks, rollout_row
from lightning_jax.types import Rollout, RolloutStatus, Task

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


class Store(SpanFile):
    """SQLite file of one run. Any thread may call any method; each call is one transaction.

    A call waits while another process holds the file's lock. On an event loop use `in_order`, which
    does not block the loop.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        """Open the file, or create it. Raises StoreError if it is invalid or not writable.

        `read_only` neither creates nor changes the file, so a run may be using it. A file with an
        older schema is then read into memory and migrated there.
        """
        super().__init__(Path(path), read_only=read_only)

    def _write(self, query: str, *values: object) -> int:
        """Run a statement, and return the number of rows that it changed."""
        with self._transaction() as db:
            return db.execute(query, values).rowcount

    # Rollouts

    def add_rollout(self, rollout: Rollout, task: Task | None = None) -> None:
        """Add a new rollout, which must be queued. Raises ValueError if its id is taken.

        The fields of its task are kept for `task_fields`.
        """
        _check_transition(rollout.rollout_id, None, rollout.status)
        row = rollout_row(rollout, task)
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
                _check_transition(rollout_id, self.rollout(rollout_id).status, status)

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
        text = self._one("SELECT reasons FROM rollouts WHERE rollout_id = ?", rollout_id)
        return parse(text or "{}", dict)

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
        query = "SELECT asker, verdict FROM judge_verdicts WHERE digest = ? ORDER BY rowid"
        return dict(self._rows(query, digest))

    def add_verdict(self, digest: str, asker: str, verdict: str) -> None:
        """Keep a judge's answer. The first one for a digest and an asker stays."""
        query = "INSERT OR IGNORE INTO judge_verdicts VALUES (?, ?, ?)"
        self._write(query, digest, asker, verdict)

    def rollout(self, rollout_id: str) -> Rollout:
        """Return the rollout with that id. Raises StoreError if there is none."""
        query = f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE rollout_id = ?"
        for row in self._rows(query, rollout_id):
            return as_rollout(row)
        raise StoreError.unknown(
            rollout_id,
            f"rollout {rollout_id!r} is not in the store; add it with add_rollout first.",
        )

    def task_fields(self, rollout_id: str) -> dict[str, str]:
        """Return the fields of the rollout's task as texts, or {} if they were not recorded."""
        text = self._one("SELECT task FROM rollouts WHERE rollout_id = ?", rollout_id)
        return parse(text or "{}", dict)

    def rollouts(
        self, *, phase: str | None = None, step: int | None = None, group_id: str | None = None
    ) -> list[Rollout]:
        """Return the matching rollouts, sorted by step, group, index and attempt."""
        conditions = {"phase": phase, "step": step, "group_id": group_id}
        values = {name: value for name, value in conditions.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in values) or "1"
        query = f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE {where} "
        query += "ORDER BY step, group_id, place, attempt"
        return [as_rollout(row) for row in self._rows(query, *values.values())]

    def next_step(self, phase: str) -> int:
        """Return the first step of which no rollout of the phase is stored, nor of a later one."""
        return self._one("SELECT coalesce(max(step), -1) + 1 FROM rollouts WHERE phase = ?", phase)

    def abandon_running(self, reason: str, rollout_id: str | None = None) -> int:
        """Mark queued and running rollouts, or only that one, as stopped. Return their number.

        `reason` is STOP, or CRASH when resuming, before new rollouts start.
        """
        return self._write(
            "UPDATE rollouts SET status = 'stopped', reason = ?1, "
            "detail = 'the run ended while this rollout was ' || status "
            "WHERE status IN ('queued', 'running') AND (?2 IS NULL OR rollout_id = ?2)",
            *(reason, rollout_id),
        )

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
        query = "UPDATE rollouts SET superseded = 2 WHERE step >= ? AND superseded = 0"
        self._write(query, step)

    def supersede_marked(self) -> None:
        """Supersede the steps that `mark_for_repeat` marked, before a run repeats them."""
        step = self._one("SELECT MIN(step) FROM rollouts WHERE superseded = 2")
        if step is not None:
            self.supersede(step)

    def set_step_groups(self, step: int, group_ids: Sequence[str]) -> None:
        """Record the groups that a step trains on. A resumed run may repeat this."""
        self._write(
            "INSERT INTO step_groups (step, group_ids) VALUES (?, ?) "
            "ON CONFLICT (step) DO UPDATE SET group_ids = excluded.group_ids",
            *(step, json.dumps(list(group_ids))),
        )

    def step_groups(self, step: int) -> list[str]:
        """Return the ids of the groups that a step trained on, or [] if none is recorded."""
        text = self._one("SELECT group_ids FROM step_groups WHERE step = ?", step)
        return parse(text or "[]", list)

    def all_step_groups(self) -> dict[int, list[str]]:
        """Return the ids of the groups of each recorded step, by step."""
        rows = self._rows("SELECT step, group_ids FROM step_groups ORDER BY step")
        return {step: parse(group_ids, list) for step, group_ids in rows}

    def step_of_group(self, group_id: str) -> int | None:
        """Return the step that trained on the group, or None if none is recorded."""
        query = "SELECT step FROM step_groups, json_each(group_ids) WHERE json_each.value = ?"
        return self._one(query, group_id)

    def add_external_group(self, group_id: str, step: int, name: str | None, task: Task) -> None:
        """Record a group that a program outside opened in this step, with its whole task.

        A group that is known stays as it is.
        """
        self._write(
            "INSERT INTO external_groups (group_id, step, name, task) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            *(group_id, step, name, json.dumps(task)),
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
        rows = self._rows(
            "SELECT group_id, step, place, name, task FROM (SELECT *, rowid AS row, "
            "row_number() OVER (PARTITION BY step ORDER BY rowid) - 1 AS place "
            "FROM external_groups WHERE step BETWEEN ?1 AND ?2) "
            "WHERE group_id NOT IN (SELECT value FROM step_groups, json_each(group_ids) "
            "WHERE step_groups.step < ?2) "
            "AND group_id NOT IN (SELECT group_id FROM dropped_groups WHERE step <= ?2) "
            "ORDER BY row",
            *(first, step),
        )
        return [ExternalGroup(*row[:4], task=parse(row[4], dict)) for row in rows]

    # Calls

    def failed_calls(self) -> list[tuple[str | None, int, str | None]]:
        """Return (reason, number, example) of failed calls to the policy, most frequent first.

        The example is a rollout id, or None for a call outside rollouts.
        """
        return self._rows(
            "SELECT json_extract(attributes, '$.\"error.type\"') AS reason, "
            "COUNT(*) AS number, MIN(rollout_id) FROM spans WHERE error IS NOT NULL AND "
            "json_extract(attributes, '$.\"lightning.policy\"') IS NOT NULL "
            "GROUP BY reason ORDER BY number DESC, reason"
        )

    def num_calls(self) -> int:
        """Return the number of recorded calls to the policy, including failed ones.

        Several choices of one call count once.
        """
        return self._one(
            "SELECT COUNT(*) FROM spans WHERE "
            "json_extract(attributes, '$.\"lightning.policy\"') IS NOT NULL AND "
            "json_extract(attributes, '$.\"lightning.choice_index\"') IS NULL"
        )

    # Weights

    def add_version(self, version: int, step: int, time_s: float | None = None) -> None:
        """Record that these weights began to serve. A resumed run may repeat this."""
        self._write(
            "INSERT INTO weights_versions (version, step, time) VALUES (?, ?, ?) "
            "ON CONFLICT (version) DO UPDATE SET step = excluded.step, time = excluded.time",
            *(version, step, time.time() if time_s is None else time_s),
        )

    def versions(self) -> list[WeightsVersion]:
        """Return the weights versions that served, oldest first."""
        rows = self._rows("SELECT version, step, time FROM weights_versions ORDER BY version")
        return [WeightsVersion(*row) for row in rows]


class TemporaryStore(Store):
    """Store in a directory of its own, which is deleted by `close` or when the process exits."""

    def __init__(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="lightning_jax-"))
        try:
            super().__init__(directory / "store.sqlite")
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._identity = None  # nobody will look for it
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
        raise InvalidValue.missing(
            "reward", f"rollout {rollout_id!r} is scored without a reward; expected a number."
        )
    if (status.endswith("_failure") or status == "stopped") and not reason:
        raise InvalidValue.missing(
            "reason", f"rollout {rollout_id!r} ends without a reason; expected a short code."
        )
