"""A model's SQL: extracted from its reply, run read-only within limits, compared with gold SQL.

Queries run in processes of sqlite_worker.py, which stay for the next query. A query that exceeds
its time or breaks SQLite takes only its own process with it.
"""

import atexit
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_ROWS = 1000  # read of a result that is only shown
MAX_GOLD_ROWS = 100_000
TIME_LIMIT_S = 3.0  # of one query
GOLD_TIME_LIMIT_S = 60.0
MEMORY_BYTES = 2**29  # of one worker process; SQLite may use half of it
MAX_WORKERS = max(4, os.cpu_count() or 1)  # queries that run at once
MAX_LINE_BYTES = 2**28  # of a worker's output: several times what sqlite_worker.py writes


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
    # SQLite's scanner refuses both of these.
    scanned = body.encode("utf-8", "replace").decode().replace("\0", " ")
    for end in re.finditer(r";[ \t]*(?=\n|$)", body):
        if sqlite3.complete_statement(scanned[: end.start() + 1]):  # not within a string
            body = body[: end.start()]
            break
    return body.strip().rstrip("; \t\n")


class SandboxBroken(ConnectionError):
    """The database or a worker process cannot be used, which is no fault of the query."""


class Worker:
    """A process that runs one query at a time."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("sqlite_worker.py"))
        # It needs the standard library alone, and gets none of our environment.
        words = [sys.executable, "-I", "-S", program, str(MEMORY_BYTES)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env={}
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, query: dict[str, Any]) -> Result | None:
        """Return the result, or None if the process ends instead.

        Raises QueryError, and SandboxBroken if the database cannot be opened.
        """
        limit_s = query["time_limit_s"]
        deadline = time.monotonic() + limit_s
        timer = threading.Timer(limit_s, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            rows, answer = self._exchange(query)
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        if time.monotonic() >= deadline:
            self.close()  # the timer may do so at any time
        if "error" in answer:
            raise QueryError(clip(answer["error"], 100))
        if "fault" in answer:
            raise SandboxBroken(f"database {query['db_path']} cannot be opened: {answer['fault']}")
        if answer:
            return Result(rows, answer["num_columns"], answer["cut"])
        if time.monotonic() >= deadline:
            raise QueryError(f"took over {limit_s:g} seconds")
        return None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()

    def _exchange(self, query: dict[str, Any]) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
        """Return the rows and the last line of the answer, which is empty if none came."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # then its output ends, too
            stdin.write(json.dumps(query).encode() + b"\n")
            stdin.flush()
        rows: list[tuple[Any, ...]] = []
        while (line := stdout.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            answer = json.loads(line)
            if "rows" not in answer:
                return rows, answer
            rows += (tuple(map(_cell, row)) for row in answer["rows"])
        return rows, {}


def _cell(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


_SLOTS = threading.BoundedSemaphore(MAX_WORKERS)
_IDLE: list[Worker] = []
os.register_at_fork(after_in_child=_IDLE.clear)  # two readers of one pipe would mix answers


@atexit.register
def close_workers() -> None:
    """End the processes that wait for queries."""
    while _IDLE:
        _IDLE.pop().close()


def run_query(
    db_path: str, sql: str, *, max_rows: int = MAX_ROWS, time_limit_s: float = TIME_LIMIT_S
) -> Result:
    """Return at most `max_rows` rows of one SELECT. Raises QueryError for the query's own faults.

    A missing database is not the query's fault and raises FileNotFoundError; a database or a worker
    process that cannot be used raises SandboxBroken.
    """
    if not re.match(r"\s*(?:SELECT|WITH)\b", sql, re.I):
        raise QueryError("only one SELECT query is allowed")
    if not Path(db_path).is_file():
        raise FileNotFoundError(f"database {db_path} does not exist; expected a SQLite file.")
    query = {"db_path": db_path, "sql": sql, "max_rows": max_rows, "time_limit_s": time_limit_s}
    with _SLOTS:
        for _ in range(2):  # the system may have ended the first process
            worker = _idle_worker()
            try:
                result = worker.run(query)
            finally:
                if worker.is_alive:
                    _IDLE.append(worker)
            if result is not None:
                return result
            worker.close()
    raise QueryError("the query ended its process")


def _idle_worker() -> Worker:
    with suppress(IndexError):
        while True:
            worker = _IDLE.pop()
            if worker.is_alive:
                return worker
            worker.close()
    try:
        return Worker()
    except OSError as error:
        raise SandboxBroken(f"a process for queries does not start: {error}") from error


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
