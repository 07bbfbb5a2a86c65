"""Tests of allowed SQL, query extraction from replies, and comparison of results."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlite_sandbox
from hypothesis import given
from hypothesis import strategies as st
from sqlite_sandbox import (
    QueryError,
    _same_rows,
    close_workers,
    extract_sql,
    orders_result,
    reward,
    run_query,
    score,
)

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"


@pytest.mark.parametrize(
    "text, sql",
    [
        ("SELECT 1", "SELECT 1"),
        (" SELECT 1 ; \n", "SELECT 1"),
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        ("```SELECT 1```", "SELECT 1"),
        ("```sqlite SELECT 1", "SELECT 1"),
        ("Here it is:\n```SQL\nselect 1\n```\nIt gives 1.", "select 1"),
        ("SQL: SELECT 1", "SELECT 1"),
        (
            "The query is: WITH a AS (SELECT 1) SELECT * FROM a;",
            "WITH a AS (SELECT 1) SELECT * FROM a",
        ),
        ("Sure.\nSELECT 1\nFROM t", "SELECT 1\nFROM t"),
        ("SELECT 1;\nThis selects 1.", "SELECT 1"),
        ("SELECT ';\n' FROM t;", "SELECT ';\n' FROM t"),
        ("SELECT 1; DROP TABLE t", "SELECT 1; DROP TABLE t"),  # two statements: refused later
        ("DROP TABLE t;", "DROP TABLE t"),
        ("SELECT '\0;\n';\nx", "SELECT '\0;\n'"),
        ("SELECT '\ud800;\n';\nx", "SELECT '\ud800;\n'"),
        ("", ""),
    ],
)
def test_extract_sql(text: str, sql: str) -> None:
    assert extract_sql(text) == sql


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM pet",
        "INSERT INTO pet (name) VALUES ('x')",
        "WITH a AS (SELECT 1) DELETE FROM pet",
        "WITH a AS (SELECT 1) INSERT INTO pet (name) SELECT 'x'",
        "CREATE TEMP TABLE t (x)",
        "PRAGMA user_version = 3",
        "SELECT * FROM pragma_database_list",
        "ATTACH 'other.sqlite' AS other",
        "SELECT load_extension('x')",
        "SELECT fts3_tokenizer('simple')",
        "SELECT fts3_tokenizer('x', X'4141414141414141')",
        "SELECT * FROM pet WHERE FTS3_Tokenizer('x', X'4141414141414141') IS NULL",
        "SELECT 1; DELETE FROM pet",
        "VACUUM INTO 'copy.sqlite'",
        "EXPLAIN SELECT 1",
        "",
        "SELECT \0",
        "SELECT '\ud800'",
        "SELECT " + "NOT " * 5000 + "1",
    ],
)
def test_everything_but_one_select_is_refused(task: dict[str, Any], sql: str) -> None:
    before = Path(task["db_path"]).read_bytes()
    with pytest.raises(QueryError):
        run_query(task["db_path"], sql)
    assert Path(task["db_path"]).read_bytes() == before
    assert [path.name for path in Path(task["db_path"]).parent.iterdir()] == ["pets?.sqlite"]


def test_deep_parentheses_are_refused_or_answered(task: dict[str, Any]) -> None:
    """Newer SQLite releases have a parser with a growing stack."""
    sql = "SELECT " + "(" * 5000 + "1" + ")" * 5000
    try:
        assert run_query(task["db_path"], sql).rows == [(1,)]
    except QueryError as error:
        assert "stack overflow" in str(error)


@pytest.mark.parametrize(
    "sql",
    [
        ENDLESS,
        "SELECT count(*) FROM (" + ENDLESS.replace("max(x)", "x") + ")",
        "SELECT count(*) FROM " + ", ".join(f"pet p{i}" for i in range(20)),
    ],
)
def test_an_endless_query_is_stopped(task: dict[str, Any], sql: str) -> None:
    with pytest.raises(QueryError, match=r"0\.2"):
        run_query(task["db_path"], sql, time_limit_s=0.2)


@pytest.mark.parametrize(
    "sql, reason",
    [
        ("SELECT zeroblob(100000000)", "too big"),
        ("SELECT 'aaaa' LIKE '" + "%a" * 200 + "'", "too complex"),
        (ENDLESS.replace("max(x)", "hex(zeroblob(90000))"), "too large"),
    ],
)
def test_huge_values_are_stopped(task: dict[str, Any], sql: str, reason: str) -> None:
    with pytest.raises(QueryError, match=reason):
        run_query(task["db_path"], sql, max_rows=10_000_000)


# Each row takes SQLite a fifth of a second in one step, which nothing within it interrupts. The
# needle depends on the row: SQLite would compute a constant once.
ONE_LONG_STEP = (
    "SELECT sum(instr(replace(hex(zeroblob(99990)), '00', 'aa'),"
    " replace(hex(zeroblob(49990)), '00', 'aa') || a.rowid)) FROM pet a, pet b, pet c, pet d"
)


def test_one_long_step_is_stopped(task: dict[str, Any]) -> None:
    with pytest.raises(QueryError, match=r"0\.05"):
        run_query(task["db_path"], ONE_LONG_STEP, time_limit_s=0.05)
    assert run_query(task["db_path"], "SELECT 1").rows == [(1,)]


@pytest.mark.parametrize("call", ["json_group_array({})", "group_concat({})", "max({})"])
def test_memory_is_bounded(task: dict[str, Any], call: str) -> None:
    """The worker hits its limit, and this process does not grow."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sql = ENDLESS.replace("max(x)", call.format("hex(zeroblob(50000 + x % 2))"))
    with pytest.raises(QueryError):
        run_query(task["db_path"], sql, time_limit_s=2)
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 2**26


def test_a_worker_stays_for_the_next_query(task: dict[str, Any]) -> None:
    close_workers()
    run_query(task["db_path"], "SELECT 1")
    (worker,) = sqlite_sandbox._IDLE
    with pytest.raises(QueryError):
        run_query(task["db_path"], "SELECT nme FROM pet")
    (same,) = sqlite_sandbox._IDLE
    assert same is worker


def test_a_killed_worker_is_replaced(task: dict[str, Any]) -> None:
    run_query(task["db_path"], "SELECT 1")
    killed = [worker._process.pid for worker in sqlite_sandbox._IDLE]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert run_query(task["db_path"], "SELECT 1").rows == [(1,)]
    assert sqlite_sandbox._IDLE[-1]._process.pid not in killed


def test_queries_of_many_threads_keep_their_answers(task: dict[str, Any]) -> None:
    """Each worker answers one query at a time, and there are no more workers than allowed."""
    close_workers()
    queries = [f"SELECT {n}" if n % 5 else ENDLESS for n in range(60)]

    def rows(sql: str) -> list[tuple]:
        try:
            return run_query(task["db_path"], sql, time_limit_s=3 if sql != ENDLESS else 0.1).rows
        except QueryError:
            return []

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(rows, queries))
    assert results == [[(n,)] if n % 5 else [] for n in range(60)]
    assert len(sqlite_sandbox._IDLE) <= sqlite_sandbox.MAX_WORKERS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_knows_no_secret_and_is_ended_first(task: dict[str, Any]) -> None:
    run_query(task["db_path"], "SELECT 1")
    directory = Path(f"/proc/{sqlite_sandbox._IDLE[-1]._process.pid}")
    assert (directory / "environ").read_bytes() == b""
    assert int((directory / "oom_score_adj").read_text()) == 1000


def test_a_worker_ends_with_its_reader(task: dict[str, Any]) -> None:
    """If the reader is killed during a query, the worker ends by itself."""
    program = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(Path(str(sqlite_sandbox.__file__)).parent)!r})
import sqlite_sandbox
def leave():
    os.kill(os.getpid(), signal.SIGKILL)
worker = sqlite_sandbox.Worker()
print(worker._process.pid, flush=True)
threading.Timer(0.2, leave).start()
worker.run({{"db_path": {task["db_path"]!r}, "sql": {ENDLESS!r}, "max_rows": 1, "time_limit_s": 1}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    pid, deadline = int(done.stdout), time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_write_ahead_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "wal.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE t AS SELECT 1 AS a")
        db.commit()
    assert run_query(str(path), "SELECT a FROM t").rows == [(1,)]


def test_cells_arrive_as_they_are(task: dict[str, Any]) -> None:
    sql = "SELECT NULL, 9223372036854775807, 9e999, 0.1, 'a\nb', x'00ff', ''"
    (row,) = run_query(task["db_path"], sql).rows
    assert row == (None, 2**63 - 1, float("inf"), 0.1, "a\nb", b"\0\xff", "")


def test_functions_of_honest_queries_are_allowed(task: dict[str, Any]) -> None:
    sql = """
        SELECT upper(name) || '->' || substr(name, 1, 2), round(avg(age) OVER (), 2),
               strftime('%Y', '2020-01-02'), CAST(age AS INTEGER), coalesce(age, 0),
               json_extract('{"a": 3}', '$.a'), row_number() OVER (ORDER BY name),
               iif(age > 5, 1, 0)
        FROM pet WHERE name LIKE 'R%' AND current_date > '2000-01-01'
    """
    assert run_query(task["db_path"], sql).rows == [("REX->Re", 3.0, "2020", 3, 3.0, 3, 1, 0)]


def test_row_limit(task: dict[str, Any]) -> None:
    cut = run_query(task["db_path"], "SELECT name FROM pet", max_rows=3)
    assert (len(cut.rows), cut.cut) == (3, True)
    whole = run_query(task["db_path"], "SELECT name FROM pet", max_rows=4)
    assert (len(whole.rows), whole.cut) == (4, False)


def test_a_missing_database_is_not_the_queries_fault(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_query(str(tmp_path / "no.sqlite"), "SELECT 1")
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    path = tmp_path / "latin.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t AS SELECT CAST(x'4de4' AS TEXT) AS a")
        db.commit()
    assert run_query(str(path), "SELECT a FROM t").rows == [("M\ufffd",)]


@pytest.mark.parametrize(
    "gold, sql, expected",
    [
        ("SELECT name FROM pet", "SELECT name FROM pet ORDER BY name", 1.0),  # any order
        ("SELECT name FROM pet ORDER BY name", "SELECT name FROM pet ORDER BY name ASC", 1.0),
        ("SELECT name FROM pet ORDER BY name", "SELECT name FROM pet ORDER BY name DESC", 0.0),
        ("SELECT kind FROM pet", "SELECT DISTINCT kind FROM pet", 0.0),  # a multiset
        ("SELECT kind FROM pet", "SELECT kind FROM pet UNION ALL SELECT 'dog'", 0.0),
        ("SELECT name, age FROM pet", "SELECT age, name FROM pet", 1.0),  # columns in any order
        ("SELECT name, kind FROM pet", "SELECT kind, kind FROM pet", 0.0),
        # Each column has the right cells, but they belong to other rows.
        ("SELECT 1, 2 UNION ALL SELECT 2, 1", "SELECT 1, 1 UNION ALL SELECT 2, 2", 0.0),
        (
            "SELECT name, age, kind FROM pet ORDER BY name",
            "SELECT kind, name, age FROM pet ORDER BY name",
            1.0,
        ),
        (
            "SELECT name, age FROM pet ORDER BY name",
            "SELECT age, name FROM pet ORDER BY name DESC",
            0.0,
        ),
        ("SELECT 1", "SELECT 1.0", 1.0),
        ("SELECT 1", "SELECT '1'", 0.0),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", 1.0),
        ("SELECT 1000001", "SELECT 1000002", 0.0),  # integers must be equal
        ("SELECT age FROM pet WHERE pet_id = 4", "SELECT NULL", 1.0),
        ("SELECT age FROM pet WHERE pet_id = 4", "SELECT 0", 0.0),
        ("SELECT age FROM pet WHERE pet_id > 9", "SELECT name FROM pet WHERE 0", 1.0),
        ("SELECT age FROM pet WHERE pet_id > 9", "SELECT name, age FROM pet WHERE 0", 0.0),
        ("SELECT age FROM pet WHERE pet_id > 9", "SELECT name FROM pet", 0.0),
        ("SELECT count(*) FROM pet", "SELECT count(* FROM pet", 0.0),
        ("SELECT count(*) FROM pet", "", 0.0),
        ('SELECT name FROM pet WHERE kind = "dog"', "SELECT name FROM pet WHERE kind = 'dog'", 1.0),
    ],
)
def test_reward(task: dict[str, Any], gold: str, sql: str, expected: float) -> None:
    assert reward(task | {"query": gold}, sql) == expected


@pytest.mark.parametrize(
    "gold, sql, expected",
    [
        ("SELECT kind FROM pet", "SELECT DISTINCT kind FROM pet", 1.0),
        ("SELECT count(DISTINCT kind) FROM pet", "SELECT count(kind) FROM pet", 1.0),
        ("SELECT 'distinct'", "SELECT DISTINCT 'distinct'", 1.0),
        ("SELECT 'distinct'", "SELECT ''", 0.0),
        ("SELECT name, age FROM pet", "SELECT age, name FROM pet", 1.0),
        ("SELECT age FROM pet WHERE pet_id > 9", "SELECT name, age FROM pet WHERE 0", 1.0),
        ("SELECT name FROM pet ORDER BY name", "SELECT name FROM pet ORDER BY name DESC", 0.0),
        ("SELECT count(*) FROM pet", "SELECT count(* FROM pet", 0.0),
    ],
)
def test_execution_accuracy(task: dict[str, Any], gold: str, sql: str, expected: float) -> None:
    assert score(task | {"query": gold}, sql)["execution_accuracy"] == expected


def test_many_equal_columns_are_compared_in_bounded_time(task: dict[str, Any]) -> None:
    halves = "SELECT * FROM (VALUES (0), (1))"
    joins = " CROSS JOIN ".join(f"({halves}) AS t{i}" for i in range(9))
    columns = [f"t{i}.column1" for i in range(9)]
    gold = f"SELECT {', '.join(columns)} FROM {joins}"
    # Every column and every pair of columns has the same cells, but one row differs.
    wrong = f"{gold} WHERE {' + '.join(columns)} < 9 UNION ALL SELECT {', '.join(['0'] * 9)}"
    assert reward(task | {"query": gold}, wrong) == 0.0  # trying all orders would take hours
    assert reward(task | {"query": gold}, f"SELECT {', '.join(columns[::-1])} FROM {joins}") == 1.0


def test_a_broken_gold_query_is_reported(task: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'pets_0'"):
        reward(task | {"query": "SELECT nme FROM pet"}, "SELECT 1")


@pytest.mark.parametrize(
    "sql, ordered",
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n by a limit 1", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 3)", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", False),
        ("WITH x AS (SELECT a FROM t ORDER BY a) SELECT a FROM x", False),
        ("SELECT 'order by' FROM t", False),
        ('SELECT "order by" FROM t -- order by', False),
        ("SELECT a FROM t /* order by */ UNION SELECT b FROM u ORDER BY 1", True),
        ("SELECT ')' FROM t ORDER BY a", True),
        ("SELECT border BYTES FROM t", False),
    ],
)
def test_orders_result(sql: str, ordered: bool) -> None:
    assert orders_result(sql) is ordered


CELLS = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.floats(-1e6, 1e6, allow_subnormal=False),
    st.sampled_from(["a", "b", ""]),
)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=8), st.randoms())
def test_shuffled_and_rounded_rows_are_the_same(rows: list[tuple], random: Any) -> None:
    other = [tuple(c * (1 + 1e-13) if isinstance(c, float) else c for c in row) for row in rows]
    random.shuffle(other)
    assert _same_rows(rows, other, ordered=False)
    if rows:
        assert not _same_rows(rows, [*other[1:], ("other", None)], ordered=False)
