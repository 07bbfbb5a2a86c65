"""Text-to-SQL agent: write a query, run it, check the result, and rewrite. At most 3 queries.

This is an ordinary LangGraph program for any OpenAI-compatible server, and has no code for
training. Its calls form one growing conversation, so each prompt extends the one before. The schema
comes first, so questions on one database share a prefix. The workflow follows the text-to-SQL agent
of arXiv 2508.03680.

    python agents/spider_sql.py --base-url http://127.0.0.1:8000/v1 --db a.sqlite --question "..."

A task is a dict: `id`, `db_id`, `question`, `query` (gold SQL), `db_path` (SQLite file), `schema`.
"""

import argparse
import asyncio
import functools
import operator
import random
import re
import sqlite3
import ssl
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypedDict

try:
    import openai
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from langgraph.runtime import Runtime
    from langsmith import tracing_context
except ImportError as error:
    message = (
        f"agents/spider_sql.py needs LangGraph and langchain-openai ({error}); install them with "
        "the extra spider: pip install -e '.[spider]'"
    )
    if __name__ == "__main__":
        sys.exit(message)
    raise ImportError(message, name=error.name) from error

sys.path.insert(0, str(Path(__file__).parent))  # missing when this file is loaded by path
from sqlite_sandbox import (
    MAX_ROWS,
    QueryError,
    Result,
    clip,
    extract_sql,
    quoted,
    reward,
    run_query,
    score,
)

MAX_TURNS = 3  # queries: the first one and two rewrites
MAX_SQL_TOKENS = 96
MAX_VERDICT_TOKENS = 8
REPAIR_SHARE = 0.5  # share of demonstrated tasks that also show a wrong query and its rewrite

SYSTEM = "You write SQLite queries."
CHECK = "Is this right? Reply CORRECT or WRONG."
REWRITE = "Write the corrected query."

Task = dict[str, Any]
Message = dict[str, Any]

# ---- Prompts -----------------------------------------------------------------------------------


def first_messages(task: Task, *, typed: bool = False, ask: str = "") -> list[Message]:
    """Return the start of the conversation: the schema before the question, and then `ask`.

    With `typed`, tables are written as statements that create them, with the type of each column.
    """
    schema = typed_schema(task) if typed else task["schema"]
    lines = [f"{schema}\n", f"Question: {task['question']}", *([ask] if ask else [])]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "\n".join(lines)}]


def typed_schema(task: Task) -> str:
    """Return a task's tables as statements that create them, and its line of foreign keys."""
    keys = [line for line in task["schema"].splitlines() if line.startswith("Keys:")]
    columns = "SELECT name, lower(type) FROM pragma_table_info(?)"
    with closing(_open(task["db_path"])) as db:
        tables = [
            f"CREATE TABLE {quoted(table)} (\n"
            + ",\n".join(
                f"  {quoted(name)} {kind}".rstrip() for name, kind in db.execute(columns, [table])
            )
            + "\n);"
            for (table,) in db.execute(_TABLES).fetchall()
        ]
    return "\n".join([*tables, *keys])


def observe(db_path: str, sql: str) -> tuple[str, bool]:
    """Run the query. Return the text that the model reads, and True if the query failed."""
    try:
        return preview(run_query(db_path, sql)), False
    except QueryError as error:
        return f"Error: {error}", True


def preview(result: Result) -> str:
    """Format the number of rows and the first three rows, shortened."""
    count = f"over {MAX_ROWS}" if result.cut else len(result.rows)
    lines = [" | ".join(clip(str(cell), 24) for cell in row) for row in result.rows[:3]]
    return "\n".join([f"Result, {count} row{'s' * (count != 1)}:", *(clip(x, 80) for x in lines)])


def is_wrong(verdict: str) -> bool:
    """Return True if the checker objects. A reply with neither word counts as no objection."""
    match = re.search(r"\b(wrong|incorrect|not correct|correct)\b", verdict, re.I)
    return match is not None and match[1].lower() != "correct"


def _user(*lines: str) -> Message:
    return {"role": "user", "content": "\n".join(lines)}


# ---- Workflow ----------------------------------------------------------------------------------


class State(TypedDict):
    messages: Annotated[list[Message], operator.add]
    sql: str
    turns: int  # queries written
    max_turns: int
    observation: str
    failed: bool  # the last query raised an error
    wrong: bool  # the checker objects to the query


@dataclass(frozen=True)
class Context:
    db_path: str
    chat: ChatOpenAI
    sql_tokens: int
    verdict_tokens: int


async def _reply(runtime: Runtime[Context], agent: str, messages: list[Message], limit: int) -> str:
    answer = await runtime.context.chat.ainvoke(
        messages, max_tokens=limit, extra_headers={"x-agent-name": agent}
    )
    return answer.content if isinstance(answer.content, str) else ""


async def _write(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
    text = await _reply(runtime, "writer", state["messages"], runtime.context.sql_tokens)
    message = {"role": "assistant", "content": text}
    return {"messages": [message], "sql": extract_sql(text), "turns": 1}


async def _execute(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
    seen, failed = await asyncio.to_thread(observe, runtime.context.db_path, state["sql"])
    return {"observation": seen, "failed": failed, "wrong": False}


async def _check(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
    ask, limit = _user(state["observation"], CHECK), runtime.context.verdict_tokens
    text = await _reply(runtime, "checker", [*state["messages"], ask], limit)
    return {"messages": [ask, {"role": "assistant", "content": text}], "wrong": is_wrong(text)}


async def _rewrite(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
    ask = _user(state["observation"], REWRITE) if state["failed"] else _user(REWRITE)
    text = await _reply(runtime, "rewriter", [*state["messages"], ask], runtime.context.sql_tokens)
    return {
        "messages": [ask, {"role": "assistant", "content": text}],
        "sql": extract_sql(text),
        "turns": state["turns"] + 1,
    }


def _after_execute(state: State) -> str:
    if state["turns"] >= state["max_turns"]:
        return END  # no turn is left, so a verdict changes nothing
    return "rewrite" if state["failed"] else "check"


@functools.cache
def _graph() -> Any:
    graph = StateGraph(State, context_schema=Context)
    graph.add_node("write", _write)
    graph.add_node("execute", _execute)
    graph.add_node("check", _check)
    graph.add_node("rewrite", _rewrite)
    graph.add_edge(START, "write")
    graph.add_edge("write", "execute")
    graph.add_conditional_edges("execute", _after_execute, ["rewrite", "check", END])
    graph.add_conditional_edges(
        "check", lambda s: "rewrite" if s["wrong"] else END, ["rewrite", END]
    )
    graph.add_edge("rewrite", "execute")
    return graph.compile()


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes 20 ms, so all clients share one


@functools.cache
def _unused_sync_client() -> openai.DefaultHttpxClient:
    return openai.DefaultHttpxClient(verify=_tls())  # else ChatOpenAI makes one per rollout


async def answer(
    task: Task,
    llm: Any,
    *,
    sql_tokens: int = MAX_SQL_TOKENS,
    verdict_tokens: int = MAX_VERDICT_TOKENS,
    max_turns: int = MAX_TURNS,
    typed: bool = False,
) -> State:
    """Return the finished workflow's state; `sql` is the answer.

    `llm` has base_url, api_key and model. If it has a prompt `ask`, that stands after the question.
    With `max_turns` 1 the first query is the answer, without a check. `typed` is that of
    `first_messages`.
    """
    ask = getattr(llm, "prompts", {}).get("ask", "")
    async with openai.DefaultAsyncHttpxClient(verify=_tls()) as http:
        chat = ChatOpenAI(
            base_url=llm.base_url,
            api_key=llm.api_key,
            model=llm.model,
            http_client=_unused_sync_client(),
            http_async_client=http,
            use_responses_api=False,
        )
        # Send nothing to LangSmith, regardless of the environment.
        with tracing_context(enabled=False):
            return await _graph().ainvoke(
                {
                    "messages": first_messages(task, typed=typed, ask=ask),
                    "max_turns": max_turns,
                },
                context=Context(task["db_path"], chat, sql_tokens, verdict_tokens),
            )


async def run(
    task: Task,
    llm: Any,
    *,
    sql_tokens: int = MAX_SQL_TOKENS,
    verdict_tokens: int = MAX_VERDICT_TOKENS,
    max_turns: int = MAX_TURNS,
    typed: bool = False,
) -> dict[str, float]:
    """Return the reward of the final query, and whether Spider's own evaluation accepts it.

    The options are those of `answer`.
    """
    final = await answer(
        task,
        llm,
        sql_tokens=sql_tokens,
        verdict_tokens=verdict_tokens,
        max_turns=max_turns,
        typed=typed,
    )
    return await asyncio.to_thread(score, task, final["sql"])


# ---- Demonstrations ----------------------------------------------------------------------------


def hint(task: Task) -> str:
    """Return the gold query for a teacher to read (docs/howto/learn_from_hints.md)."""
    query = task["query"].rstrip("; ")
    return f"Your whole reply is this one line. Repeat it word by word:\n{query};"


def demonstrate(tasks: Sequence[Task]) -> list[list[Message]]:
    """Return demonstrations with gold SQL. The assistant messages are the ones to learn.

    Each task is solved at once. A share of them is also shown with a wrong query first, which is
    only context (`"train": False`), and its rewrite. `"agent"` names the sub-agent of a message.
    The same tasks always give the same conversations.
    """
    queries: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        queries[task["db_id"]].add(task["query"])
    conversations = []
    for task in tasks:
        rng = random.Random(f"demonstrate {task['id']}")
        conversations.append([*first_messages(task), *_solved(task, "writer")])
        if rng.random() < REPAIR_SHARE:
            mistake = _mistake(task, sorted(queries[task["db_id"]]), rng)
            if mistake:
                rewritten = _solved(task, "rewriter")
                conversations.append([*first_messages(task), *mistake, *rewritten])
    return conversations


def demonstrate_queries(tasks: Sequence[Task]) -> list[list[Message]]:
    """Return demonstrations of the first query alone, without its check and rewrites."""
    return [[*first_messages(task), _solved(task, "writer")[0]] for task in tasks]


def _solved(task: Task, agent: str) -> list[Message]:
    sql = tidy(task["query"])
    seen, _ = observe(task["db_path"], sql)
    return [
        {"role": "assistant", "content": sql, "agent": agent},
        _user(seen, CHECK),
        {"role": "assistant", "content": "CORRECT", "agent": "checker"},
    ]


def _mistake(task: Task, others: list[str], rng: random.Random) -> list[Message]:
    """Return the turns of a wrong query, up to the rewrite request, or [] if none was found."""
    candidates = [*rng.sample(others, min(3, len(others))), *_slips(task, rng)]
    rng.shuffle(candidates)
    for sql in map(tidy, candidates):
        if reward(task, sql) == 1.0:
            continue
        written = {"role": "assistant", "content": sql, "train": False}
        seen, failed = observe(task["db_path"], sql)
        if failed:
            return [written, _user(seen, REWRITE)]
        verdict = {"role": "assistant", "content": "WRONG", "agent": "checker"}
        return [written, _user(seen, CHECK), verdict, _user(REWRITE)]
    return []


_FLIPS = {
    ">": "<",
    "<": ">",
    "max": "min",
    "min": "max",
    "avg": "sum",
    "sum": "avg",
    "desc": "asc",
    "asc": "desc",
}


def _slips(task: Task, rng: random.Random) -> Iterator[str]:
    """Yield the gold query with one likely slip: a word flipped or swapped, or no WHERE."""
    sql = tidy(task["query"])
    names = sorted(set(re.findall(r"\w+", task["schema"].split("\nKeys:")[0])))
    spots = list(re.finditer(r"\w+|[<>]", sql))
    for spot in rng.sample(spots, len(spots)):
        if spot[0] in names:
            yield sql[: spot.start()] + rng.choice(names) + sql[spot.end() :]
        elif spot[0].lower() in _FLIPS:
            yield sql[: spot.start()] + _FLIPS[spot[0].lower()] + sql[spot.end() :]
    if where := re.search(r" WHERE [^()]*?(?= GROUP | ORDER |$)", sql, re.I):
        yield sql[: where.start()] + sql[where.end() :]


def tidy(sql: str) -> str:
    """Return the query on one line with single blanks and no semicolon. Strings do not change."""
    one = re.sub(
        r"""('(?:[^']|'')*'|"[^"]*")|\s+(,)|\s+""", lambda m: m[1] or m[2] or " ", sql.strip()
    )
    return one.rstrip("; ")


# ---- Command line ------------------------------------------------------------------------------


_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"


def _open(db_path: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{Path(db_path).absolute().as_uri()}?mode=ro", uri=True)


def read_schema(db_path: str) -> str:
    """Return a database's tables and foreign keys, one table per line."""
    with closing(_open(db_path)) as db:
        lines, keys = [], []
        for (table,) in db.execute(_TABLES).fetchall():
            columns = db.execute("SELECT name FROM pragma_table_info(?)", [table]).fetchall()
            lines.append(f"{quoted(table)}({', '.join(quoted(name) for (name,) in columns)})")
            links = 'SELECT "from", "table", "to" FROM pragma_foreign_key_list(?)'
            keys += [
                f"{quoted(table)}.{quoted(a)}={quoted(to)}.{quoted(b or a)}"
                for a, to, b in db.execute(links, [table])
            ]
    return "\n".join(lines + ([f"Keys: {', '.join(keys)}"] if keys else []))


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a question with SQL.")
    parser.add_argument(
        "--base-url", required=True, help="base URL of an OpenAI-compatible server, with /v1"
    )
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--db", required=True, help="SQLite file, opened read-only")
    parser.add_argument("--question", required=True)
    args = parser.parse_args()
    if not Path(args.db).is_file():
        parser.error(f"--db is {args.db!r}; expected an existing SQLite file.")
    task = {"db_path": args.db, "schema": read_schema(args.db), "question": args.question}
    llm = SimpleNamespace(base_url=args.base_url, api_key=args.api_key, model=args.model)
    try:
        final = asyncio.run(answer(task, llm))
    except openai.OpenAIError as error:
        parser.exit(1, f"{args.base_url} gave no answer: {error}\n")
    for message in final["messages"]:
        print(f"[{message['role']}] {message['content']}")
    print(f"\n{final['sql']}\n{observe(args.db, final['sql'])[0]}")


if __name__ == "__main__":
    main()
