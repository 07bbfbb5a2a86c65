"""Rows of a store's tables: rollouts, with the fields of their tasks, and spans."""

import contextlib
import functools
import itertools
import json
import sqlite3
from collections.abc import Container, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from lightning_jax.traces._sqlite import parse, savepoint
from lightning_jax.types import Rollout, Span, Task

ROLLOUT_COLUMNS = (
    "rollout_id, task_id, group_id, phase, step, place, attempt, status, reward, reason, detail, "
    "metrics, superseded, components, worker"
)
SPAN_COLUMNS = (
    "trace_id, span_id, parent_span_id, name, start_ns, end_ns, attributes, error, sequence"
)
MAX_ROWS = 99  # of a statement: some builds of SQLite allow 999 variables
# Of the task that a row keeps.
MAX_FIELDS = 50
MAX_FIELD_CHARS = 2000
MAX_NAME_CHARS = 100

Row = tuple[Any, ...]


def marks(row: Sequence[object]) -> str:
    """Return SQL's placeholders for some values."""
    return ", ".join("?" * len(row))


# Rollouts


def rollout_row(rollout: Rollout, task: Task | None) -> Row:
    """Return the row of ROLLOUT_COLUMNS and the task."""
    return (
        *(rollout.rollout_id, rollout.task_id, rollout.group_id, rollout.phase, rollout.step),
        *(rollout.index, rollout.attempt, rollout.status),
        *(rollout.reward, rollout.reason, rollout.detail, json.dumps(rollout.metrics)),
        *(rollout.superseded, json.dumps(rollout.components), rollout.worker),
        json.dumps(shorten_task(task or {})),
    )


def as_rollout(row: Row) -> Rollout:
    """Return the rollout in a row of ROLLOUT_COLUMNS."""
    *fields, metrics, superseded, components, worker = row
    return Rollout(
        *fields,
        metrics=parse(metrics, dict),
        superseded=superseded == 1,
        components=parse(components, dict),
        worker=worker,
    )


def is_unnamed(task: Mapping[str, Any]) -> bool:
    """Return True if a task has no id. Tables write a missing id as null, NaN or ""."""
    name = task.get("id")
    return name is None or name == "" or name != name


def free_name(name: str, names: Container[str]) -> str:
    """Return the name, with a + appended until it differs from all of `names`."""
    while name in names:
        name += "+"
    return name


def shorten_task(task: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a task other than its id. Values other than strings become JSON.

    Strings are cut at MAX_FIELD_CHARS and fields at MAX_FIELDS. The number of omitted characters or
    fields stands in their place.
    """
    fields = {}
    for name, value in task.items():
        if name == "id":
            continue
        if len(fields) == MAX_FIELDS:
            fields["..."] = f"{len(task) - 1 - MAX_FIELDS} more fields"
            break
        text = _text(value)
        more = len(text) - MAX_FIELD_CHARS
        short = text if more <= 0 else f"{text[:MAX_FIELD_CHARS]} [... {more:,} more characters]"
        fields[str(name)[:MAX_NAME_CHARS]] = short
    return fields


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except Exception:  # noqa: BLE001  (a cycle, keys that are no texts, a custom __repr__)
        return f"<{type(value).__name__}>"


# Spans


def span_row(rollout_id: str | None, span: Span, sequence: int) -> Row:
    """Return the row of SPAN_COLUMNS and the rollout."""
    # Several times as fast as `json`, which would hold the interpreter lock for as long.
    attributes = to_json(dict(span.attributes), inf_nan_mode="constants").decode()
    return (
        *(span.trace_id, span.span_id, span.parent_span_id, span.name),
        *(span.start_ns, span.end_ns, attributes, span.error, sequence, rollout_id),
    )


def as_span(row: Row) -> Span:
    """Return the span in a row of SPAN_COLUMNS."""
    *ids, attributes, error, sequence = row
    loaded = parse(attributes, dict).items()
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in loaded}
    return Span(*ids, attributes=frozen, error=error, sequence=sequence)


@functools.cache
def add_spans(number: int) -> str:
    """Return a statement that adds this many spans, all or none."""
    rows = ", ".join([f"({marks(range(10))})"] * number)
    return f"INSERT INTO spans ({SPAN_COLUMNS}, rollout_id) VALUES {rows}"


def insert_spans(db: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Add all rows or none, in as few statements as possible."""
    parts = [rows[start : start + MAX_ROWS] for start in range(0, len(rows), MAX_ROWS)]
    with savepoint(db) if len(parts) > 1 else contextlib.nullcontext():
        for part in parts:
            db.execute(add_spans(len(part)), list(itertools.chain.from_iterable(part)))


def first_duplicate(db: sqlite3.Connection, rows: Sequence[Row]) -> Row:
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
