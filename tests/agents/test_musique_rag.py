"""Tests of the search agent, with a scripted model and search, and of its demonstrations."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_jax.rollouts.agents.functions import load_agent
from lightning_jax.settings import ConfigError

pytest.importorskip("agents.run", reason="needs openai-agents, of the extra musique")

import musique_rag
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from coded import raises_coded

PROGRAM = str(musique_rag.__file__)
FOUND = [
    {"pid": "p1", "title": "Lap Engine", "text": "It was made\nby James Watt."},
    {"pid": "p2", "title": "Rotative engine", "text": "A kind of engine."},
    {"pid": "p4", "title": "Governor", "text": "It keeps a speed."},
]
TASK: dict[str, Any] = {
    "id": "q1",
    "question": "Where was the maker of the Lap Engine educated?",
    "answer": "University of Glasgow",
    "answer_aliases": ["Glasgow"],
    "supporting": ["p1", "p3"],
    "decomposition": [
        {"question": "Who made the Lap Engine?", "answer": "James Watt", "paragraph": FOUND[0]},
        {
            "question": "#1 >> educated at",
            "answer": "University of Glasgow",
            "paragraph": {"pid": "p3", "title": "James Watt", "text": "He went to Glasgow."},
        },
    ],
}


@dataclass
class Search:
    """Test double of agents/paragraph_search.py with two paragraphs per search."""

    answer: Any = "found"  # or a body, an HTTP status, or None to never answer
    url: str = ""
    queries: list[Any] = field(default_factory=list)

    async def find(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.queries.append(body["query"])
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, int):
            return web.json_response({}, status=self.answer)
        if self.answer != "found":
            return web.json_response(self.answer)
        others = [paragraph for paragraph in FOUND if paragraph["pid"] not in body["without"]]
        return web.json_response({"paragraphs": others[:2]})


@dataclass
class Model:
    """Test double of a server with OpenAI's /v1/responses.

    A reply is a text, ("search", arguments), ("cut", text) for a reply cut by the token limit, an
    HTTP status, or None to never answer.
    """

    replies: list[Any]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    other_paths: list[str] = field(default_factory=list)

    async def respond(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        number = len(self.bodies) - 1
        reply = self.replies[min(number, len(self.replies) - 1)]
        if reply is None:
            await asyncio.Event().wait()
        assert reply is not None
        if isinstance(reply, int):
            body = {"error": {"message": "scripted failure", "type": "server_error", "code": None}}
            return web.json_response(body, status=reply, headers={"x-should-retry": "false"})
        kind, text = ("text", reply) if isinstance(reply, str) else reply
        item: dict[str, Any] = {"id": f"msg_{number:032x}_0", "status": "completed"}
        if kind in ("text", "cut"):
            part = {"type": "output_text", "text": text, "annotations": []}
            item |= {"type": "message", "role": "assistant", "content": [part]}
        else:
            item |= {"type": "function_call", "call_id": f"call_{number}", "name": kind}
            item["arguments"] = text
        cut = {"reason": "max_output_tokens"} if kind == "cut" else None
        return web.json_response(
            {
                "id": f"resp_{number}",
                "object": "response",
                "created_at": 1,
                "model": "policy",
                "status": "incomplete" if cut else "completed",
                "incomplete_details": cut,
                "output": [item],
                "parallel_tool_calls": True,
                "tool_choice": "auto",
                "tools": [],
            }
        )

    async def not_found(self, request: web.Request) -> web.Response:
        self.other_paths.append(request.path)
        return web.json_response({}, status=404)


def query(text: str) -> tuple[str, str]:
    return "search", json.dumps({"query": text})


@asynccontextmanager
async def serving(
    replies: Sequence[Any], search: Search | None = None
) -> AsyncIterator[tuple[Model, Search, dict[str, Any], Any]]:
    """Run both servers, and yield (model, search, task, llm)."""
    model, search = Model(list(replies)), search or Search()
    app = web.Application()
    app.router.add_post("/rollout/r1/v1/responses", model.respond)
    app.router.add_post("/search", search.find)
    app.router.add_route("*", "/{rest:.*}", model.not_found)
    async with TestServer(app, handler_cancellation=True) as server:
        search.url = str(server.make_url("/")).rstrip("/")
        llm = SimpleNamespace(
            base_url=f"{search.url}/rollout/r1/v1", api_key="secret", model="policy", prompts={}
        )
        yield model, search, TASK | {"search_url": search.url}, llm


async def test_it_searches_and_answers() -> None:
    replies = [query("maker of Lap Engine"), query("James Watt"), "<answer>Glasgow!</answer>"]
    async with serving(replies) as (model, search, task, llm):
        result = await musique_rag.run(task, llm)
    assert result == {
        "reward": pytest.approx(1.0), "em": 1.0, "f1": 1.0, "format": 1.0, "searches": 2.0,
        "recall": 0.5,
    }  # fmt: skip
    assert search.queries == ["maker of Lap Engine", "James Watt"]
    first, second, third = model.bodies
    assert first["instructions"] == musique_rag.SYSTEM
    assert first["input"] == [{"role": "user", "content": TASK["question"]}]
    assert (first["model"], first["max_output_tokens"]) == ("policy", musique_rag.MAX_TOKENS)
    assert "temperature" not in first  # set by the run, not by the agent
    assert second["input"][-1]["output"] == (
        "Lap Engine: It was made by James Watt.\nRotative engine: A kind of engine."
    )
    assert third["input"][-1]["output"] == "Governor: It keeps a speed."  # only new ones
    assert model.other_paths == []  # no traces are sent


async def test_a_question_ends_with_the_prompt_ask() -> None:
    async with serving(["<answer>Glasgow</answer>"]) as (model, _, task, llm):
        llm.prompts["ask"] = "Be brief."
        result = await musique_rag.run(task, llm)
    assert result["reward"] == pytest.approx(1.0)
    question = f"{TASK['question']}\nBe brief."
    assert model.bodies[0]["input"] == [{"role": "user", "content": question}]


async def test_rounds_require_searches_and_then_a_reader_answers() -> None:
    replies = [query("maker"), ("search", "{}"), query("James Watt"), "<answer>Glasgow</answer>"]
    async with serving(replies) as (model, search, task, llm):
        llm.prompts["ask"] = "Be brief."
        result = await musique_rag.run(task, llm, rounds=3)
    assert (result["reward"], result["searches"]) == (pytest.approx(1.0), 2.0)
    assert search.queries == ["maker", "James Watt"]
    *searching, reading = model.bodies
    for body in searching:
        assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
        assert [tool["name"] for tool in body["tools"]] == ["search"]
    assert not reading["tools"]
    assert not {"tool_choice", "parallel_tool_calls", "instructions"} & reading.keys()
    first = "Lap Engine: It was made by James Watt.\nRotative engine: A kind of engine.\n"
    second = "Governor: It keeps a speed.\n"
    question = f"{TASK['question']}\nBe brief."
    answer = "Reply with the shortest answer, between <answer> and </answer>."
    assert [body["input"] for body in model.bodies] == [
        [{"role": "user", "content": text}]
        for text in (
            question,
            first + question,
            first + question,  # a call with wrong arguments finds nothing
            f"{first}{second}\nQuestion: {TASK['question']}\n{answer}",
        )
    ]


async def test_a_search_that_is_down_ends_required_searches() -> None:
    async with serving([query("maker")], Search(503)) as (_, _, task, llm):
        with pytest.raises(ConnectionError, match="gave no answer"):
            await musique_rag.run(task, llm, rounds=1)


def test_recall_can_be_a_component_of_the_reward() -> None:
    attempt = SimpleNamespace(metrics={"recall": 0.5, "f1": 0.0})
    assert musique_rag.recall_of_attempt(TASK, attempt) == 0.5


@pytest.mark.parametrize("rounds", [0, musique_rag.MAX_SEARCHES + 1])
async def test_rounds_have_limits(rounds: int) -> None:
    async with serving(["<answer>Glasgow</answer>"]) as (model, _, task, llm):
        with pytest.raises(ValueError, match=f"rounds is {rounds}; expected 1 to 6"):
            await musique_rag.run(task, llm, rounds=rounds)
    assert model.bodies == []


async def test_a_half_right_answer_without_tags() -> None:
    async with serving(["University of Oslo"]) as (_, _, task, llm):
        result = await musique_rag.run(task, llm)
    # 2 of 3 words are among 3 gold ones: F1 = 2 * 2 / 6. The format is wrong.
    assert result["reward"] == pytest.approx(0.9 * 2 / 3)
    assert (result["em"], result["searches"], result["recall"]) == (0.0, 0.0, 0.0)


async def test_searches_have_a_limit() -> None:
    limit = musique_rag.MAX_SEARCHES
    replies = [query(str(number)) for number in range(limit + 1)] + ["<answer>x</answer>"]
    async with serving(replies) as (model, search, task, llm):
        result = await musique_rag.run(task, llm)
    assert result["searches"] == len(search.queries) == limit
    assert model.bodies[-1]["input"][-1]["output"] == musique_rag.NO_MORE


async def test_an_agent_that_loops_for_ever_is_ended() -> None:
    async with serving([query("again")]) as (model, search, task, llm):
        with pytest.raises(MaxTurnsExceeded):
            await musique_rag.run(task, llm)
    assert len(search.queries) == musique_rag.MAX_SEARCHES
    assert len(model.bodies) == musique_rag.MAX_SEARCHES + 2


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        ([query("a"), ("cut", "<answer>Univ")], ModelBehaviorError, None),
        ([("browse", "{}")], ModelBehaviorError, "browse"),  # no such tool
        ([query("a"), 500], openai.InternalServerError, "scripted failure"),
    ],
)
async def test_the_rollout_ends_with_a_reason(
    script: list[Any], error: type[Exception], text: str | None
) -> None:
    async with serving(script) as (_, _, task, llm):
        with pytest.raises(error, match=text):
            await musique_rag.run(task, llm)


@pytest.mark.parametrize("arguments", ['{"q": "Watt"}', '{"query": 7}', "{not JSON", "[]"])
async def test_the_model_sees_the_error_of_wrong_arguments(arguments: str) -> None:
    async with serving([("search", arguments), "<answer>Glasgow</answer>"]) as parts:
        model, search, task, llm = parts
        assert (await musique_rag.run(task, llm))["em"] == 1.0
    assert search.queries == []
    assert model.bodies[1]["input"][-1]["output"].startswith("Error: expected")


async def test_the_model_sees_that_nothing_was_found() -> None:
    async with serving([query("zzz"), "x"], Search({"paragraphs": []})) as (model, _, task, llm):
        await musique_rag.run(task, llm)
    assert model.bodies[1]["input"][-1]["output"] == musique_rag.NOTHING_FOUND


@pytest.mark.parametrize("answer", [500, {"no": "paragraphs"}, [], "text"])
async def test_a_broken_search_is_not_the_agents_doing(answer: Any) -> None:
    async with serving([query("a"), "x"], Search(answer)) as (_, search, task, llm):
        with pytest.raises(ConnectionError) as caught:
            await musique_rag.run(task, llm)
        assert type(caught.value) is ConnectionError and search.url in str(caught.value)


async def test_a_search_that_is_gone_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving([query("a"), "x"]) as (_, _, task, llm):
        with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9") as caught:
            await musique_rag.run(task | {"search_url": "http://127.0.0.1:9"}, llm)
        assert type(caught.value) is ConnectionError
    monkeypatch.setattr(musique_rag, "SEARCH_TIMEOUT_S", 0.2)
    async with serving([query("a"), "x"], Search(None)) as (_, search, task, llm):
        with pytest.raises(ConnectionError, match="TimeoutError"):
            await musique_rag.run(task, llm)
    assert search.queries == ["a"]


async def test_a_deadline_ends_a_rollout_that_waits() -> None:
    async with serving([None]) as (model, _, task, llm):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(musique_rag.run(task, llm), timeout=1)
    assert len(model.bodies) == 1


def test_queries_hold_the_answers_they_refer_to() -> None:
    assert musique_rag.queries(TASK["decomposition"]) == [
        "Who made the Lap Engine?",
        "James Watt educated at",
    ]
    odd = [{"question": "#2 and #0 of #1  >> x", "answer": "a"}]
    assert musique_rag.queries(odd) == ["#2 and #0 of a x"]


async def test_demonstrations_search_for_every_fact() -> None:
    async with serving([]) as (_, search, task, _):
        (record,) = await asyncio.to_thread(musique_rag.demonstrate, [task])
    assert search.queries == ["Who made the Lap Engine?", "James Watt educated at"]
    assert [message["role"] for message in record["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant"
    ]  # fmt: skip
    _, _, call, found, _, second, last = record["messages"]
    assert call["tool_calls"][0]["function"] == {
        "name": "search",
        "arguments": '{"query": "Who made the Lap Engine?"}',
    }
    assert found["tool_call_id"] == call["tool_calls"][0]["id"]
    assert found["content"].splitlines()[1] == "Rotative engine: A kind of engine."
    # The second search misses the paragraph, which then replaces the last one found.
    assert second["content"] == "James Watt: He went to Glasgow."
    assert last["content"] == "<answer>University of Glasgow</answer>"


async def test_a_demonstration_does_not_repeat_a_paragraph() -> None:
    steps = [step | {"paragraph": FOUND[0]} for step in TASK["decomposition"]]
    async with serving([]) as (_, _, task, _):
        (record,) = await asyncio.to_thread(
            musique_rag.demonstrate, [task | {"decomposition": steps}]
        )
    found = [message["content"] for message in record["messages"] if message["role"] == "tool"]
    assert found[0].startswith("Lap Engine: ") and found[1] == "Governor: It keeps a speed."


async def test_demonstrations_show_what_a_rollout_shows() -> None:
    replies = [query(text) for text in musique_rag.queries(TASK["decomposition"])]
    async with serving([*replies, "<answer>x</answer>"]) as (model, _, task, llm):
        await musique_rag.run(task, llm)
        (record,) = await asyncio.to_thread(musique_rag.demonstrate, [task])
    body = model.bodies[-1]
    (tool,) = body["tools"]
    offered = record["tools"][0]["function"]
    assert {key: tool[key] for key in ("name", "description", "parameters")} == offered
    system, user, _, found, *_ = record["messages"]
    assert (system["content"], user["content"]) == (body["instructions"], TASK["question"])
    assert found["content"] == body["input"][2]["output"]


async def test_a_demonstration_without_search_says_so() -> None:
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9"):
        musique_rag.demonstrate([TASK | {"search_url": "http://127.0.0.1:9"}])


def test_without_its_framework_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = shutil.copy(PROGRAM, tmp_path)
    monkeypatch.setitem(sys.modules, "agents", None)
    with raises_coded(ConfigError, "not_loaded") as caught:
        load_agent(f"{copy}:run")
    assert "openai-agents" in str(caught.value) and "lightning-jax[musique]" in str(caught.value)


async def _by_hand(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        PROGRAM,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OPENAI_API_KEY": "not-to-be-used"},
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_by_hand() -> None:
    async with serving([query("Lap Engine"), "<answer>Glasgow</answer>"]) as (_, search, _, llm):
        where = ("--base-url", llm.base_url, "--search-url", search.url, "--question", "Where?")
        code, out, err = await _by_hand(*where)
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == '[search] {"query": "Lap Engine"}'
        assert out.endswith("\n<answer>Glasgow</answer>\n")
    code, _, err = await _by_hand(*where)  # the servers are closed
    assert code == 1 and "APIConnectionError" in err and err.count("\n") == 1
