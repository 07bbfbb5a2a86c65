"""What SQL may do, what a reply's query is, and when two results are the same."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlite_sandbox import (
    QueryError,
    _same_rows,
    extract_sql,
    orders_result,
    reward,
    run_query,
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
    """Newer releases of SQLite have a parser whose stack grows."""
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
    start = time.monotonic()
    with pytest.raises(QueryError, match=r"took over 0\.2 seconds"):
        run_query(task["db_path"], sql, time_limit_s=0.2)
    assert time.monotonic() - start < 5


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
        ("SELECT name, age FROM pet", "SELECT age, name FROM pet", 0.0),  # columns in place
        ("SELECT 1", "SELECT 1.0", 1.0),
        ("SELECT 1", "SELECT '1'", 0.0),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", 1.0),
        ("SELECT 1000001", "SELECT 1000002", 0.0),  # whole numbers are exact
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


def test_a_broken_gold_query_is_reported(task: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="gold query of task 'pets_0' fails"):
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
