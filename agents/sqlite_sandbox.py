"""A model's SQL: extracted from its reply, run read-only within limits, compared with gold SQL."""

import math
import re
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_ROWS = 1000  # read of a result that is only shown
MAX_GOLD_ROWS = 100_000
MAX_RESULT_BYTES = 16_000_000  # of text in one result
TIME_LIMIT_S = 3.0  # of one query
GOLD_TIME_LIMIT_S = 60.0


class QueryError(Exception):
    """The query was refused, failed or took too long; the text is for the model."""


@dataclass(frozen=True)
class Result:
    rows: list[tuple[Any, ...]]
    num_columns: int
    cut: bool  # there were more rows than were read


def extract_sql(text: str) -> str:
    """The query in a model's reply, without fence, label, prose around it or final semicolon."""
    fence = re.search(r"```(?:sql(?:ite)?\b)?(.*?)(?:```|$)", text, re.S | re.I)
    body = fence[1] if fence else text
    start = re.search(r"(?:^|:)\s*(?:SELECT|WITH)\b", body, re.M | re.I)
    if start:
        body = body[start.start() :].removeprefix(":")
    for end in re.finditer(r";[ \t]*(?=\n|$)", body):
        if sqlite3.complete_statement(body[: end.start() + 1]):  # not within a string
            body = body[: end.start()]
            break
    return body.strip().rstrip("; \t\n")


# Everything else is refused: writes, ATTACH, PRAGMA, transactions.
_READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


def run_query(
    db_path: str, sql: str, *, max_rows: int = MAX_ROWS, time_limit_s: float = TIME_LIMIT_S
) -> Result:
    """At most `max_rows` rows of one SELECT. Raises QueryError for the query's own faults.

    A missing database is not the query's fault and raises FileNotFoundError.
    """
    if not re.match(r"\s*(?:SELECT|WITH)\b", sql, re.I):
        raise QueryError("only one SELECT query is allowed")
    if not Path(db_path).is_file():
        raise FileNotFoundError(f"database {db_path} does not exist; expected a SQLite file.")
    deadline = time.monotonic() + time_limit_s
    uri = f"{Path(db_path).absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        # What the progress handler cannot stop, because it is one step, is kept small.
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 200_000)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
        connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY
        )
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 2000)
        try:
            return _fetch(connection.execute(sql), max_rows)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            late = time.monotonic() > deadline
            reason = f"took over {time_limit_s:g} seconds" if late else str(error)
            raise QueryError(clip(reason, 100)) from error


def _fetch(cursor: sqlite3.Cursor, max_rows: int) -> Result:
    rows: list[tuple[Any, ...]] = []
    num_bytes = 0
    for row in cursor:
        if len(rows) == max_rows:
            return Result(rows, len(row), cut=True)
        num_bytes += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
        if num_bytes > MAX_RESULT_BYTES:
            raise QueryError("the result is too large")
        rows.append(row)
    return Result(rows, len(cursor.description or ()), cut=False)


def reward(task: dict[str, Any], sql: str) -> float:
    """1.0 if `sql` gives what the gold query gives on the task's database, else 0.0.

    Rows are a multiset, or a sequence where the gold query orders its result. Columns stay in
    place, numbers agree to six digits. Raises ValueError if the gold query itself fails.
    """
    try:
        gold = run_query(
            task["db_path"], task["query"], max_rows=MAX_GOLD_ROWS, time_limit_s=GOLD_TIME_LIMIT_S
        )
    except QueryError as error:
        raise ValueError(
            f"gold query of task {task.get('id')!r} fails ({error}); fix or drop it."
        ) from error
    try:
        got = run_query(task["db_path"], sql, max_rows=len(gold.rows) + 1)
    except QueryError:
        return 0.0
    if got.num_columns != gold.num_columns or len(got.rows) != len(gold.rows):
        return 0.0
    return float(_same_rows(gold.rows, got.rows, ordered=orders_result(task["query"])))


_TOKEN = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | \[[^\]]*\]  # strings and quoted names
    | --[^\n]* | /\*.*?\*/ | [()] | \border\s+by\b""",
    re.I | re.S | re.X,
)


def orders_result(sql: str) -> bool:
    """Whether the outermost query has an ORDER BY: one outside strings, comments, parentheses."""
    depth = 0
    for token in _TOKEN.findall(sql):
        depth += (token == "(") - (token == ")")
        if depth == 0 and token[0] in "oO":
            return True
    return False


def _same_rows(gold: list[tuple], got: list[tuple], *, ordered: bool) -> bool:
    if gold == got:
        return True
    if not ordered:
        gold, got = sorted(gold, key=_sort_key), sorted(got, key=_sort_key)
    return all(map(_same_cell, *(([cell for row in rows for cell in row]) for rows in (gold, got))))


def _same_cell(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        both_int = isinstance(a, int) and isinstance(b, int)
        return a == b if both_int else math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    return type(a) is type(b) and a == b


def _sort_key(row: tuple) -> tuple[list, list]:
    """Exact cells first, rounded numbers after: sums that differ by rounding sort alike."""
    numbers = [(i, cell) for i, cell in enumerate(row) if isinstance(cell, int | float)]
    others = [(i, repr(cell)) for i, cell in enumerate(row) if not isinstance(cell, int | float)]
    return others, [
        (i, float(f"{cell:.9g}") if isinstance(cell, float) else cell) for i, cell in numbers
    ]


def clip(text: str, size: int) -> str:
    """The text, or its beginning and three dots, in at most `size` characters."""
    return text if len(text) <= size else text[: size - 3] + "..."
