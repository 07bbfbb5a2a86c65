"""Lists of a store's rollouts in pages, groups and counts, without their transcripts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_jax.traces._sqlite import StoreFile, parse
from lightning_jax.traces.rows import ROLLOUT_COLUMNS, as_rollout, marks
from lightning_jax.types import Rollout

Order = Literal["task", "worst", "spread"]
ORDERS: dict[Order, str] = {
    "task": "step DESC, group_id",
    "worst": "AVG(reward) IS NULL, AVG(reward), group_id",
    "spread": "MAX(reward) - MIN(reward) DESC, group_id",
}
NEWEST_STEP_FIRST = "ORDER BY step DESC, phase DESC, group_id, place, attempt"
RECENT = 5000  # newest rollouts in which running ones are searched
SEARCHED = ("rollout_id", "task_id", "task", "reason", "detail", "reasons")  # columns with texts


@dataclass(frozen=True)
class Filter:
    """Conditions on rollouts. Those that are None or "" do not count."""

    phase: str | None = None
    step: int | None = None
    status: str | None = None
    group_id: str | None = None
    text: str = ""  # a part of an id, a task, a failure or a judge's text, in any case

    def where(self) -> tuple[str, list[object]]:
        """Return a WHERE clause and its values. Superseded rollouts match only by their group."""
        columns = ("phase", "step", "status", "group_id")
        fields = {name: getattr(self, name) for name in columns}
        conditions = {name: value for name, value in fields.items() if value is not None}
        clauses = [f"{name} = ?" for name in conditions]
        values: list[object] = list(conditions.values())
        if self.group_id is None:
            clauses.append("superseded != 1")
        if self.text:
            clauses.append(f"({' OR '.join(f'{name} LIKE ? ESCAPE ?' for name in SEARCHED)})")
            for name in SEARCHED:
                written = json.dumps(self.text)[1:-1] if name == "task" else self.text
                for sign in "\\%_":  # that LIKE would read
                    written = written.replace(sign, f"\\{sign}")
                values += [f"%{written}%", "\\"]
        return " AND ".join(clauses) or "1", values


@dataclass(frozen=True)
class GroupRow:
    """Attempts at one task in one step."""

    group_id: str
    task_id: str
    phase: str
    step: int
    number: int
    num_failed: int
    reward_mean: float | None  # None: no attempt has a reward
    reward_min: float | None
    reward_max: float | None


class StoreListing(StoreFile):
    """Store that is open for reading only."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises StoreError if it is missing, damaged or of a later release."""
        super().__init__(path, read_only=True)

    @property
    def is_copy(self) -> bool:
        """Return whether later changes of the file stay unseen, because its schema is older."""
        return not self._rows("PRAGMA database_list")[0][2]

    def counts(self) -> dict[str, int]:
        """Return the number of rollouts by status, without superseded ones."""
        query = "SELECT status, COUNT(*) FROM rollouts WHERE superseded != 1 GROUP BY status"
        return dict(self._rows(query))

    def started_s(self) -> float | None:
        """Return when the first weights began to serve, in seconds since the epoch."""
        return self._one("SELECT MIN(time) FROM weights_versions")

    def steps(self, phase: str) -> list[int]:
        """Return the steps that have rollouts of the phase, oldest first."""
        query = "SELECT DISTINCT step FROM rollouts WHERE phase = ? ORDER BY step"
        return [step for (step,) in self._rows(query, phase)]

    def rollouts(self, filter_: Filter, *, limit: int, offset: int = 0) -> list[Rollout]:
        """Return a page of the matching rollouts, newest step first."""
        where, values = filter_.where()
        rows = self._rows(
            f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE {where} "
            f"{NEWEST_STEP_FIRST} LIMIT ? OFFSET ?",
            *(*values, limit, offset),
        )
        return [as_rollout(row) for row in rows]

    def keys(self, filter_: Filter) -> list[int]:
        """Return the keys of all matching rollouts for `by_keys`, newest step first.

        Reading the pages of a long list by their offset sorts the whole list for each page.
        """
        where, values = filter_.where()
        rows = self._rows(f"SELECT rowid FROM rollouts WHERE {where} {NEWEST_STEP_FIRST}", *values)
        return [key for (key,) in rows]

    def by_keys(self, keys: Sequence[int]) -> list[Rollout]:
        """Return the rollouts with these keys, in their order. Deleted ones are left out."""
        query = f"SELECT rowid, {ROLLOUT_COLUMNS} FROM rollouts WHERE rowid IN ({marks(keys)})"
        by_key = {row[0]: as_rollout(row[1:]) for row in self._rows(query, *keys)}
        return [by_key[key] for key in keys if key in by_key]

    def rollout(self, rollout_id: str) -> Rollout | None:
        """Return one rollout, or None if there is none with this id."""
        query = f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE rollout_id = ?"
        return next(map(as_rollout, self._rows(query, rollout_id)), None)

    def newest(
        self, filter_: Filter, *, before: int | None = None, limit: int
    ) -> list[tuple[Any, ...]]:
        """Return (cursor, id) of the matching rollouts, the one that was added last first.

        `before` is the cursor after which the list continues.
        """
        where, values = filter_.where()
        return self._rows(
            f"SELECT rowid, rollout_id FROM rollouts WHERE rowid < ? AND {where} "
            "ORDER BY rowid DESC LIMIT ?",
            *(2**62 if before is None else before, *values, limit),
        )

    def number(self, filter_: Filter) -> int:
        """Return the number of matching rollouts."""
        where, values = filter_.where()
        return self._one(f"SELECT COUNT(*) FROM rollouts WHERE {where}", *values)

    def groups(
        self, filter_: Filter, order: Order, *, limit: int, offset: int = 0
    ) -> list[GroupRow]:
        """Return a page of the groups of the matching rollouts."""
        where, values = filter_.where()
        rows = self._rows(
            "SELECT group_id, task_id, phase, step, COUNT(*), SUM(status LIKE '%failure'), "
            f"AVG(reward), MIN(reward), MAX(reward) FROM rollouts WHERE {where} "
            f"GROUP BY group_id ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?",
            *(*values, limit, offset),
        )
        return [GroupRow(*row) for row in rows]

    def num_groups(self, filter_: Filter) -> int:
        """Return the number of groups of the matching rollouts."""
        where, values = filter_.where()
        query = f"SELECT COUNT(DISTINCT group_id) FROM rollouts WHERE {where}"
        return self._one(query, *values)

    def failures(self) -> list[tuple[str, str, int, str, str | None]]:
        """Return (status, reason, number, newest example, its detail), most frequent first."""
        rows = self._rows(
            "SELECT status, reason, COUNT(*) AS number, rollout_id, detail, MAX(step) "
            "FROM rollouts WHERE reason IS NOT NULL AND superseded != 1 "
            "GROUP BY status, reason ORDER BY number DESC, reason"
        )
        return [row[:5] for row in rows]

    def running(self, limit: int) -> list[tuple[Rollout, int | None]]:
        """Return (rollout, start of its first recorded span in ns) of running ones, oldest first.

        Only the newest rollouts of the store are searched.
        """
        rows = self._rows(
            f"SELECT {ROLLOUT_COLUMNS}, (SELECT MIN(start_ns) FROM spans WHERE "
            "spans.rollout_id = rollouts.rollout_id) AS start FROM rollouts "
            "WHERE rowid > (SELECT COALESCE(MAX(rowid), 0) FROM rollouts) - ? "
            "AND status = 'running' ORDER BY start IS NULL, start LIMIT ?",
            *(RECENT, limit),
        )
        return [(as_rollout(row[:-1]), row[-1]) for row in rows]

    def tasks(self, rollout_ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the fields of the rollouts' tasks by rollout id."""
        query = f"SELECT rollout_id, task FROM rollouts WHERE rollout_id IN ({marks(rollout_ids)})"
        return {name: parse(task, dict) for name, task in self._rows(query, *rollout_ids)}

    def seconds(self, rollout_ids: Sequence[str]) -> dict[str, float]:
        """Return the time from the first to the last span of the rollouts that have spans."""
        rows = self._rows(
            "SELECT rollout_id, MIN(start_ns), MAX(end_ns) FROM spans "
            f"WHERE start_ns > 0 AND rollout_id IN ({marks(rollout_ids)}) GROUP BY rollout_id",
            *rollout_ids,
        )
        return {name: max(end - start, 0) / 1e9 for name, start, end in rows}

    def neighbors(self, rollout: Rollout) -> dict[str, str]:
        """Return the ids of the rollouts before and after: attempts of a group, groups, steps."""
        here = (rollout.index, rollout.attempt)
        neighbors = {}
        for sign, order, name in (("<", "DESC", "previous"), (">", "ASC", "next")):
            queries = {
                "attempt": (
                    f"group_id = ? AND (place, attempt) {sign} (?, ?) "
                    f"ORDER BY place {order}, attempt {order}",
                    (rollout.group_id, *here),
                ),
                "group": (
                    f"phase = ? AND step = ? AND group_id {sign} ? "
                    f"ORDER BY group_id {order}, place, attempt",
                    (rollout.phase, rollout.step, rollout.group_id),
                ),
                "step": (
                    f"phase = ? AND step {sign} ? ORDER BY step {order}, group_id, place, attempt",
                    (rollout.phase, rollout.step),
                ),
            }
            for kind, (condition, values) in queries.items():
                query = f"SELECT rollout_id FROM rollouts WHERE {condition} LIMIT 1"
                for (rollout_id,) in self._rows(query, *values):
                    neighbors[f"{name}_{kind}"] = rollout_id
        return neighbors
