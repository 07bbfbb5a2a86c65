"""Sandbox for a model's SQL: extract it, run it read-only within limits, compare with gold SQL.

Queries run in processes of sqlite_worker.py, which are reused. A query that exceeds its time or
crashes SQLite ends only its own process.
"""

import atexit
import functools
import itertools
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_ROWS = 1000  # per result that is only shown
MAX_GOLD_ROWS = 100_000
TIME_LIMIT_S = 3.0  # per query
GOLD_TIME_LIMIT_S = 60.0
MEMORY_BYTES = 2**29  # per worker process; SQLite may use half of it
MAX_COLUMN_CHECKS = 200  # comparisons that look for an order of the columns
MAX_WORKERS = max(4, os.cpu_count() or 1)  # concurrent queries
MAX_LINE_BYTES = 2**28  # per line of a worker's output, several times the longest possible one


class QueryError(Exception):
    """Query that was refused, failed or took too long. The message is for the model."""


@dataclass(frozen=True)
class Result:
    rows: list[tuple[Any, ...]]
    num_columns: int
    cut: bool  # True if there were more rows


@functools.cache
def quoted(name: str) -> str:
    """Return the name, in double quotes if SQLite cannot parse it bare: `Home Town`, `From`."""
    if re.fullmatch(r"[A-Za-z_]\w*", name):
        with closing(sqlite3.connect(":memory:")) as empty, suppress(sqlite3.OperationalError):
            empty.execute(f"SELECT {name} FROM (SELECT 1 AS {name})")
            return name
    return '"' + name.replace('"', '""') + '"'


def extract_sql(text: str) -> str:
    """Return the query in a model's reply, without fence, label, prose or final semicolon."""
    fence = re.search(r"```(?:sql(?:ite)?\b)?(.*?)(?:```|$)", text, re.S | re.I)
    body = fence[1] if fence else text
    start = re.search(r"(?:^|:)\s*(?:SELECT|WITH)\b", body, re.M | re.I)
    if start:
        body = body[start.start() :].removeprefix(":")
    # SQLite's scanner accepts neither lone surrogates nor null characters.
    scanned = body.encode("utf-8", "replace").decode().replace("\0", " ")
    for end in re.finditer(r";[ \t]*(?=\n|$)", body):
        if sqlite3.complete_statement(scanned[: end.start() + 1]):  # not inside a string
            body = body[: end.start()]
            break
    return body.strip().rstrip("; \t\n")


class SandboxBroken(ConnectionError):
    """Database or worker process that cannot be used, through no fault of the query."""


class Worker:
    """Process that runs one query at a time."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("sqlite_worker.py"))
        # It needs only the standard library, and inherits none of our environment.
        words = [sys.executable, "-I", "-S", program, str(MEMORY_BYTES)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env={}
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, query: dict[str, Any]) -> Result | None:
        """Return the result, or None if the process ended without one.

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
            self.close()  # the timer may kill it at any time
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
        """Return the rows and the last line of the answer, or an empty dict if none came."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # its output ends then, too
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
os.register_at_fork(after_in_child=_IDLE.clear)  # two processes must not read from one pipe


@atexit.register
def close_workers() -> None:
    """End the idle worker processes."""
    while _IDLE:
        _IDLE.pop().close()


def run_query(
    db_path: str, sql: str, *, max_rows: int = MAX_ROWS, time_limit_s: float = TIME_LIMIT_S
) -> Result:
    """Return at most `max_rows` rows of one SELECT.

    Raises QueryError for faults of the query, FileNotFoundError for a missing database, and
    SandboxBroken if the database or a worker process cannot be used.
    """
    if not re.match(r"\s*(?:SELECT|WITH)\b", sql, re.I):
        raise QueryError("only one SELECT query is allowed")
    if not Path(db_path).is_file():
        raise FileNotFoundError(f"database {db_path} does not exist; expected a SQLite file.")
    query = {"db_path": db_path, "sql": sql, "max_rows": max_rows, "time_limit_s": time_limit_s}
    with _SLOTS:
        for _ in range(2):  # the kernel may have killed the first process
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
    """Return 1.0 if `sql` gives the gold query's result on the task's database, else 0.0.

    Row order counts only if the gold query orders its result. Column order never counts. Numbers
    must agree to six digits. Raises ValueError if the gold query itself fails.
    """
    return _match(task, *_results(task, task["query"], sql))


def score(task: dict[str, Any], sql: str) -> dict[str, float]:
    """Return `reward` and `execution_accuracy` of a query, 0 or 1 each.

    Execution accuracy is what the published evaluation of Spider measures. It differs from `reward`
    in two ways: DISTINCT is removed from both queries, and two empty results are equal. See Zhong
    et al., arXiv 2010.02840, who run each query on several databases; this is the result on one.
    Raises ValueError if the gold query itself fails.
    """
    queries = task["query"], sql
    plain = remove_distinct(queries[0]), remove_distinct(queries[1])
    gold, got = _results(task, *queries)
    earned = _match(task, gold, got)
    if plain != queries:
        gold, got = _results(task, *plain)
    is_empty = got is not None and not gold.rows and not got.rows
    return {"reward": earned, "execution_accuracy": float(is_empty or _match(task, gold, got))}


def _results(task: dict[str, Any], gold: str, sql: str) -> tuple[Result, Result | None]:
    """Return the results of the gold query and of another one, or None if that one fails."""
    expected = _gold_result(task, gold)
    try:
        return expected, run_query(task["db_path"], sql, max_rows=len(expected.rows) + 1)
    except QueryError:
        return expected, None


def _match(task: dict[str, Any], gold: Result, got: Result | None) -> float:
    return float(got is not None and _same_result(gold, got, orders_result(task["query"])))


def _gold_result(task: dict[str, Any], query: str) -> Result:
    try:
        return run_query(
            task["db_path"], query, max_rows=MAX_GOLD_ROWS, time_limit_s=GOLD_TIME_LIMIT_S
        )
    except QueryError as error:
        raise ValueError(
            f"gold query of task {task.get('id')!r} fails ({error}); fix or drop it."
        ) from error


def _same_result(gold: Result, got: Result, ordered: bool) -> bool:
    if got.num_columns != gold.num_columns or len(got.rows) != len(gold.rows):
        return False
    return _same_rows(gold.rows, got.rows, ordered=ordered) or _same_reordered(
        gold.rows, got.rows, ordered=ordered
    )


_TOKEN = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | \[[^\]]*\]  # strings and quoted names
    | --[^\n]* | /\*.*?\*/ | [()] | \border\s+by\b | \bdistinct\b""",
    re.I | re.S | re.X,
)


def remove_distinct(sql: str) -> str:
    """Return the query without the word DISTINCT, which stays in strings, names and comments."""
    return _TOKEN.sub(lambda match: "" if match[0].lower() == "distinct" else match[0], sql)


def orders_result(sql: str) -> bool:
    """Return True if the outermost query has an ORDER BY.

    One inside a string, a comment or parentheses does not count.
    """
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


def _same_reordered(gold: list[tuple], got: list[tuple], *, ordered: bool) -> bool:
    """Return True if some order of the columns of `got` gives the rows of `gold`.

    Columns are assigned one by one, and the rows of those assigned must agree. After
    MAX_COLUMN_CHECKS comparisons the results count as different.
    """
    gold_columns, got_columns = list(zip(*gold, strict=True)), list(zip(*got, strict=True))
    checks = itertools.count(1)

    def agrees(columns: Sequence[int]) -> bool:
        if next(checks) > MAX_COLUMN_CHECKS:
            return False
        ours = list(zip(*gold_columns[: len(columns)], strict=True))
        theirs = list(zip(*(got_columns[column] for column in columns), strict=True))
        return _same_rows(ours, theirs, ordered=ordered)

    def assign(columns: tuple[int, ...]) -> bool:
        if len(columns) == len(gold_columns):
            return True
        tried: set[tuple] = set()  # equal columns are interchangeable
        for column, cells in enumerate(got_columns):
            if column in columns or cells in tried:
                continue
            tried.add(cells)
            if agrees((*columns, column)) and assign((*columns, column)):
                return True
        return False

    return len(gold_columns) > 1 and assign(())


def _same_cell(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        both_int = isinstance(a, int) and isinstance(b, int)
        return a == b if both_int else math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    return type(a) is type(b) and a == b


def _sort_key(row: tuple) -> tuple[list, list]:
    """Return exact cells first, then rounded numbers, so that rounding cannot change the order."""
    numbers = [(i, cell) for i, cell in enumerate(row) if isinstance(cell, int | float)]
    others = [(i, repr(cell)) for i, cell in enumerate(row) if not isinstance(cell, int | float)]
    return others, [
        (i, float(f"{cell:.9g}") if isinstance(cell, float) else cell) for i, cell in numbers
    ]


def clip(text: str, size: int) -> str:
    """Return the text, or its start and three dots, in at most `size` characters."""
    return text if len(text) <= size else text[: size - 3] + "..."
