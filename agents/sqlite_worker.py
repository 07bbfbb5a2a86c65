"""Worker process of sqlite_sandbox.py: run SQL queries under limits that SQLite lacks.

    python -I -S agents/sqlite_worker.py MEMORY_BYTES

A query is one line of JSON on standard input. Its answer is several lines of JSON on standard
output. Any number of lines have `rows`. The last one has `num_columns` and `cut`, the query's
`error`, or the database's `fault`. The process ends when standard input closes or a query exceeds
its time limit.
"""

import json
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

MAX_RESULT_BYTES = 32_000_000  # per result: texts and blobs count their length, other cells 8
ROWS_BYTES = 500_000  # per line, so that the reader never decodes much at once
GRACE_S = 1.0  # after the time limit, in case the reader has not killed this process

# Allowed actions. All others are denied: writes, ATTACH, PRAGMA, transactions.
READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_RECURSIVE,
}
# Functions that only compute a value. All others are denied: fts3_tokenizer writes pointers,
# load_extension loads code.
FUNCTIONS = frozenset(
    """
    abs char coalesce concat concat_ws format glob hex if ifnull iif instr length like likelihood
    likely lower ltrim max min nullif octet_length printf quote random randomblob replace round
    rtrim sign soundex substr substring trim typeof unhex unicode unistr unistr_quote
    unlikely upper zeroblob
    avg count group_concat median percentile percentile_cont percentile_disc string_agg sum total
    cume_dist dense_rank first_value lag last_value lead nth_value ntile percent_rank rank
    row_number
    current_date current_time current_timestamp date datetime julianday strftime time timediff
    unixepoch
    acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10
    log2 mod pi pow power radians sin sinh sqrt tan tanh trunc
    -> ->> json json_array json_array_insert json_array_length json_error_position json_extract
    json_group_array json_group_object json_insert json_object json_patch json_pretty json_quote
    json_remove json_replace json_set json_type json_valid jsonb jsonb_array jsonb_array_insert
    jsonb_extract jsonb_group_array jsonb_group_object jsonb_insert jsonb_object jsonb_patch
    jsonb_remove jsonb_replace jsonb_set
    match
    """.split()  # noqa: SIM905
)


def authorize(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    """Allow reads and the listed functions."""
    allowed = action in READS or (
        action == sqlite3.SQLITE_FUNCTION and (name or "").lower() in FUNCTIONS
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def answers(query: dict[str, Any], memory_bytes: int) -> Iterator[dict[str, Any]]:
    """Run one query and yield the lines of its answer."""
    uri = f"{Path(query['db_path']).absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as connection:
        # This also limits memory on systems without a limit per process.
        connection.execute(f"PRAGMA hard_heap_limit = {memory_bytes // 2}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 200_000)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
        connection.set_authorizer(authorize)
        try:
            yield from results(connection.execute(query["sql"]), query["max_rows"])
        except MemoryError:
            yield {"error": "needs too much memory"}
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            yield {"error": str(error)}


def results(cursor: sqlite3.Cursor, max_rows: int) -> Iterator[dict[str, Any]]:
    """Yield the rows in parts, then the number of columns and a flag for missing rows."""
    part: list[list[Any]] = []
    part_bytes = result_bytes = 0
    end = {"num_columns": len(cursor.description or ()), "cut": False}
    for number, row in enumerate(cursor):
        if number == max_rows:
            end["cut"] = True
            break
        num_bytes = sum(len(cell) if isinstance(cell, str | bytes) else 8 for cell in row)
        result_bytes += num_bytes
        if result_bytes > MAX_RESULT_BYTES:
            yield {"error": "the result is too large"}
            return
        if part_bytes + num_bytes > ROWS_BYTES:
            yield {"rows": part}
            part, part_bytes = [], 0
        part.append([{"hex": cell.hex()} if isinstance(cell, bytes) else cell for cell in row])
        part_bytes += num_bytes
    yield {"rows": part}
    yield end


def limit_process(memory_bytes: int) -> None:
    """Limit memory and written files, and be the first process killed when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the reader, which then ends us
    import resource

    # Darwin does not support a limit on the address space. To read a database with a write-ahead
    # log, SQLite writes a small index next to it.
    for name, size in (("AS", memory_bytes), ("FSIZE", 2**20), ("CORE", 0)):
        with suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (size, size))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # Linux
        file.write("1000")


def main() -> None:
    memory_bytes = int(sys.argv[1])
    limit_process(memory_bytes)
    for line in sys.stdin.buffer:
        query = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, query["time_limit_s"] + GRACE_S)
        try:
            for answer in answers(query, memory_bytes):
                sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        except sqlite3.Error as error:  # the database cannot be opened
            sys.stdout.buffer.write(json.dumps({"fault": str(error)}).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
