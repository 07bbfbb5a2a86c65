"""Tests of the workflow, with a scripted server, and of its demonstrations."""

import asyncio
import json
import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import spider_sql
from coded import raises_coded
from scripted_server import serving

from lightning_jax.rollouts.agents.functions import load_agent
from lightning_jax.settings import ConfigError

GOLD = "SELECT name FROM pet WHERE kind = 'dog'"
FIRST = [
    {"role": "system", "content": "You write SQLite queries."},
    {
        "role": "user",
        "content": "owner(owner_id, city)\npet(pet_id, name, kind, age, owner_id)\n"
        "Keys: pet.owner_id=owner.owner_id\n\nQuestion: What are the names of the dogs?",
    },
]
PROGRAM = str(spider_sql.__file__)
RIGHT = {"reward": 1.0, "execution_accuracy": 1.0}
WRONG = {"reward": 0.0, "execution_accuracy": 0.0}
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"


async def test_a_right_query_is_checked_and_kept(task: dict[str, Any]) -> None:
    async with serving([f"```sql\n{GOLD};\n```", "CORRECT"]) as server:
        assert await spider_sql.run(task, server) == RIGHT
    assert server.agents == ["writer", "checker"]
    assert server.bodies[0]["messages"] == FIRST
    assert server.bodies[1]["messages"][-1]["content"] == (
        "Result, 2 rows:\nRex\nAce\nIs this right? Reply CORRECT or WRONG."
    )
    assert [body["max_completion_tokens"] for body in server.bodies] == [96, 8]
    assert {body["model"] for body in server.bodies} == {"policy"}
    assert "temperature" not in server.bodies[0]  # set by the run, not by the agent
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.other_paths == []


async def test_limits_are_settings(task: dict[str, Any]) -> None:
    async with serving([GOLD, "CORRECT"]) as server:
        await spider_sql.run(task, server, sql_tokens=200, verdict_tokens=9)
    assert [body["max_completion_tokens"] for body in server.bodies] == [200, 9]


async def test_one_query_may_be_all(task: dict[str, Any]) -> None:
    ask = "Reply with one query."
    async with serving(["SELECT nothing"]) as server:
        server.prompts["ask"] = ask
        assert await spider_sql.run(task, server, max_turns=1, typed=True) == WRONG
    assert server.agents == ["writer"]
    schema, question = server.bodies[0]["messages"][1]["content"].split("\n\n")
    assert question == f"Question: What are the names of the dogs?\n{ask}"
    statements, _, keys = schema.rpartition("\n")
    assert keys == "Keys: pet.owner_id=owner.owner_id"
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(statements)  # it is SQL, and makes the same columns
        columns = [row[1] for row in db.execute("PRAGMA table_info(pet)")]
    assert columns == ["pet_id", "name", "kind", "age", "owner_id"]


def test_names_that_sql_cannot_read_bare_are_quoted(tmp_path: Path) -> None:
    path = str(tmp_path / "odd.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            'CREATE TABLE "order" ("From" text, "home town" text, n integer REFERENCES "order")'
        )
    task = {"db_path": path, "schema": spider_sql.read_schema(path)}
    assert task["schema"].startswith('"order"("From", "home town", n)\nKeys: "order".n="order".n')
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(spider_sql.typed_schema(task).rpartition("\n")[0])
        columns = [row[1] for row in db.execute('PRAGMA table_info("order")')]
    assert columns == ["From", "home town", "n"]


async def test_a_wrong_query_is_rewritten(task: dict[str, Any]) -> None:
    async with serving(["SELECT name FROM pet", "WRONG", GOLD, "CORRECT"]) as server:
        final = await spider_sql.answer(task, server)
    assert spider_sql.reward(task, "SELECT name FROM pet") == 0.0
    assert spider_sql.reward(task, final["sql"]) == 1.0
    assert server.agents == ["writer", "checker", "rewriter", "checker"]
    assert server.bodies[2]["messages"][-1]["content"] == "Write the corrected query."


async def test_prompts_extend_the_one_before(task: dict[str, Any]) -> None:
    replies = ["SELECT nme FROM pet", "  SQL: SELECT 1;\n", "WRONG ", ""]
    async with serving(replies) as server:
        final = await spider_sql.answer(task, server)
    prompts = [body["messages"] for body in server.bodies]
    for earlier, later, reply in zip(prompts, prompts[1:], replies, strict=False):
        # Sampled text is sent back unchanged, including blanks and empty text.
        assert later[: len(earlier) + 1] == [*earlier, {"role": "assistant", "content": reply}]
        assert later[-1]["role"] == "user"
    assert final["messages"] == [*prompts[-1], {"role": "assistant", "content": ""}]


async def test_a_failed_query_skips_the_checker(task: dict[str, Any]) -> None:
    async with serving(["SELECT nme FROM pet", GOLD, "CORRECT"]) as server:
        assert await spider_sql.run(task, server) == RIGHT
    assert server.agents == ["writer", "rewriter", "checker"]
    assert server.bodies[1]["messages"][-1]["content"] == (
        "Error: no such column: nme\nWrite the corrected query."
    )


async def test_three_queries_are_the_limit(task: dict[str, Any]) -> None:
    wrong = "SELECT name FROM pet"
    async with serving([wrong, "WRONG", wrong, "WRONG", wrong]) as server:
        assert await spider_sql.run(task, server) == WRONG
    # The third query gets no verdict, because no rewrite could follow.
    assert server.agents == ["writer", "checker", "rewriter", "checker", "rewriter"]


async def test_writes_are_refused_and_prose_is_no_query(task: dict[str, Any]) -> None:
    before = Path(task["db_path"]).read_bytes()
    async with serving(["DROP TABLE pet", "I cannot help.", GOLD]) as server:
        assert await spider_sql.run(task, server) == RIGHT
    assert Path(task["db_path"]).read_bytes() == before
    for body in server.bodies[1:]:
        assert body["messages"][-1]["content"].startswith("Error: only one SELECT query")


async def test_an_endless_query_is_stopped_and_rewritten(task: dict[str, Any]) -> None:
    async with serving([ENDLESS, GOLD, "CORRECT"]) as server:
        reward = await asyncio.wait_for(spider_sql.run(task, server), timeout=20)
    assert reward == RIGHT
    assert server.bodies[1]["messages"][-1]["content"].startswith("Error: took over 3 seconds")


async def test_a_failing_server_fails_the_rollout(task: dict[str, Any]) -> None:
    async with serving(["SELECT 1", 500]) as server:
        with pytest.raises(openai.InternalServerError, match="scripted failure"):
            await spider_sql.run(task, server)
    assert len(server.bodies) == 2


async def test_a_deadline_ends_a_rollout_that_waits(task: dict[str, Any]) -> None:
    async with serving([GOLD, None]) as server:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(spider_sql.run(task, server), timeout=1)
    assert len(server.bodies) == 2  # no retry, and no warning about open connections


async def test_rollouts_run_side_by_side(task: dict[str, Any]) -> None:
    async with serving([GOLD] * 24) as server:  # a query as verdict is no objection
        rewards = await asyncio.gather(*(spider_sql.run(task, server) for _ in range(12)))
    assert rewards == [RIGHT] * 12
    assert len(server.bodies) == 24


@pytest.mark.parametrize(
    "verdict, wrong",
    [
        ("WRONG", True),
        ("wrong.", True),
        ("INCORRECT", True),
        ("It is not correct", True),
        ("CORRECT", False),
        ("Correct, not WRONG", False),
        ("", False),
        ("wrongly", False),
    ],
)
def test_verdicts(verdict: str, wrong: bool) -> None:
    assert spider_sql.is_wrong(verdict) is wrong


def test_preview_is_short(task: dict[str, Any]) -> None:
    rows = "WITH n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 5000) SELECT x, x FROM n"
    seen, failed = spider_sql.observe(task["db_path"], rows)
    assert (seen, failed) == ("Result, over 1000 rows:\n1 | 1\n2 | 2\n3 | 3", False)
    seen, _ = spider_sql.observe(task["db_path"], "SELECT name, age FROM pet WHERE pet_id = 4")
    assert seen == "Result, 1 row:\nKit | None"
    seen, _ = spider_sql.observe(task["db_path"], "SELECT 1 WHERE 0")
    assert seen == "Result, 0 rows:"
    seen, _ = spider_sql.observe(task["db_path"], "SELECT hex(zeroblob(500)) FROM pet")
    assert len(seen) < 120


# ---- Demonstrations ------------------------------------------------------------------------------


def _tasks(task: dict[str, Any]) -> list[dict[str, Any]]:
    queries = (
        "SELECT  count(*)  FROM pet WHERE age > 4 ;",
        "SELECT city FROM owner",
        "SELECT name FROM pet ORDER BY age DESC LIMIT 1",
        "SELECT owner.city , count(*) FROM pet JOIN owner ON pet.owner_id = owner.owner_id "
        "GROUP BY owner.city",
        "SELECT max(age) FROM pet WHERE kind = 'a  b;' OR kind = \"cat\"",
    )
    more = [task | {"id": f"pets_{i}", "query": q} for i, q in enumerate(queries * 3, start=1)]
    return [task, *more]


def _plain(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": m["role"], "content": m["content"]} for m in conversation]


async def test_the_workflow_says_what_was_demonstrated(task: dict[str, Any]) -> None:
    tasks = _tasks(task)
    for conversation in spider_sql.demonstrate(tasks):
        mine = next(t for t in tasks if conversation[-3]["content"] == spider_sql.tidy(t["query"]))
        async with serving([m["content"] for m in conversation if m["role"] == "assistant"]) as s:
            final = await spider_sql.answer(mine, s)
        assert final["messages"] == _plain(conversation)
        assert spider_sql.reward(mine, final["sql"]) == 1.0


def test_a_wrong_query_is_context_and_its_verdict_is_learned(task: dict[str, Any]) -> None:
    tasks = _tasks(task)
    conversations = spider_sql.demonstrate(tasks)
    repairs = [c for c in conversations if any(m.get("train") is False for m in c)]
    assert len(conversations) - len(repairs) == len(tasks)
    assert 2 <= len(repairs) <= len(tasks)
    for conversation in repairs:
        first, *others = [m for m in conversation if m["role"] == "assistant"]
        assert first["train"] is False
        assert all(m.get("train", True) for m in others)
        # The last query identifies the task of a conversation.
        mine = next(t for t in tasks if others[-2]["content"] == spider_sql.tidy(t["query"]))
        assert spider_sql.reward(mine, first["content"]) == 0.0
        failed = conversation[3]["content"].startswith("Error: ")
        expected = [] if failed else ["WRONG"]
        assert [m["content"] for m in others] == [*expected, others[-2]["content"], "CORRECT"]
    assert len({c[3]["content"].startswith("Error: ") for c in repairs}) == 2  # both kinds occur


def test_queries_alone_are_how_whole_demonstrations_begin(task: dict[str, Any]) -> None:
    tasks = _tasks(task)
    whole = spider_sql.demonstrate(tasks)
    for conversation, mine in zip(spider_sql.demonstrate_queries(tasks), tasks, strict=True):
        assert conversation[-1]["content"] == spider_sql.tidy(mine["query"])
        assert conversation in [found[: len(conversation)] for found in whole]


def test_the_same_tasks_give_the_same_demonstrations(task: dict[str, Any]) -> None:
    tasks = _tasks(task)
    once = json.dumps(spider_sql.demonstrate(tasks))
    assert once == json.dumps(spider_sql.demonstrate(tasks))


def test_tidy_keeps_strings() -> None:
    assert spider_sql.tidy(" SELECT a ,  b\n FROM t WHERE c = 'x  ,y' ; ") == (
        "SELECT a, b FROM t WHERE c = 'x  ,y'"
    )


# ---- Command line --------------------------------------------------------------------------------


async def _python(*args: str, **env: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *args),
        env=os.environ | env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_it_works_by_hand(task: dict[str, Any]) -> None:
    ask = ("--db", task["db_path"], "--question", task["question"])
    async with serving([GOLD, "CORRECT", 500]) as server:
        code, out, err = await _python(PROGRAM, "--base-url", server.base_url, *ask)
        assert (code, err) == (0, "")
        assert out.endswith(f"{GOLD}\nResult, 2 rows:\nRex\nAce\n")
        assert server.bodies[0]["messages"] == FIRST  # the schema it reads matches
        code, out, err = await _python(PROGRAM, "--base-url", server.base_url, *ask)
        assert (code, out) == (1, "") and "gave no answer" in err and "Traceback" not in err


async def test_help_by_hand() -> None:
    code, out, err = await _python(PROGRAM, "--help")
    assert (code, err) == (0, "") and "--base-url" in out


TRACED = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
import spider_sql
from types import SimpleNamespace
from langchain_core.tracers.langchain import wait_for_all_tracers
llm = SimpleNamespace(base_url=sys.argv[2], api_key="x", model="policy")
asyncio.run(spider_sql.answer(json.loads(sys.argv[3]), llm))
wait_for_all_tracers()
"""


async def test_nothing_goes_to_langsmith(task: dict[str, Any]) -> None:
    """Not even if the environment asks for it. Settings are cached, so this uses a new process."""
    async with serving([GOLD, "CORRECT"]) as server:
        code, _, err = await _python(
            *("-c", TRACED, str(Path(PROGRAM).parent), server.base_url, json.dumps(task)),
            LANGSMITH_TRACING="true",
            LANGSMITH_API_KEY="x",
            LANGSMITH_ENDPOINT=server.base_url.replace("/v1", "/langsmith"),
        )
    assert (code, err) == (0, "")
    assert len(server.bodies) == 2 and server.other_paths == []


def test_without_its_framework_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = shutil.copy(PROGRAM, tmp_path)
    monkeypatch.setitem(sys.modules, "langgraph.graph", None)
    with raises_coded(ConfigError, "not_loaded") as caught:
        load_agent(f"{copy}:run")
    assert "LangGraph" in str(caught.value) and "[spider]" in str(caught.value)
