"""Tests of tasks that a model drafts for an MCP server: which are kept, and what a model reads."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_server import Script, serving

from lightning_jax.environments.drafts import Drafter, as_tasks, complete
from lightning_jax.environments.mcp import open_server
from lightning_jax.types import LLM

COMMAND = shlex.join([sys.executable, str(Path(__file__).parents[1] / "mcp_program.py")])
CAPITAL = {"tool": "capital_of"}
ASKED = '{"request": "What is the capital of Peru?"}'


async def drafter_of(script: Script, number: int) -> Drafter:
    """Return a drafter that has drafted `number` tasks for a tool."""
    async with open_server(COMMAND) as server:
        drafter = Drafter(COMMAND, server.functions)
    llm = LLM(script.base_url, script.api_key, script.model)
    for _ in range(number):
        await drafter.run(CAPITAL, llm)
    return drafter


async def test_a_call_that_works_becomes_a_task() -> None:
    async with serving(['{"country": "Peru"}', ASKED]) as script:
        drafter = await drafter_of(script, 1)
    (task,) = as_tasks(drafter.drafts)
    assert task == {
        "id": "task-000",
        "request": "What is the capital of Peru?",
        "tool": "capital_of",
        "arguments": {"country": "Peru"},
        "result": "Lima",
    }
    first, second = (body["response_format"]["json_schema"]["schema"] for body in script.bodies)
    assert first["required"] == ["country"] and first["additionalProperties"] is False
    assert first["properties"]["country"]["maxLength"] > 0
    assert second["required"] == ["request"]


async def test_a_refused_call_is_tried_again_with_the_reason() -> None:
    async with serving(['{"country": "Narnia"}', '{"country": "Peru"}', ASKED]) as script:
        drafter = await drafter_of(script, 1)
    assert [draft.arguments for draft in drafter.drafts] == [{"country": "Peru"}]
    assert "there is no country 'Narnia'" in script.bodies[1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        (["no"] * 4, "no_json"),
        (['{"country": "Narnia"}'] * 4, "refused_by_the_tool"),
        (['{"country": "crash"}'], "broke_the_server"),
        (['{"country": "Peru"}', "{}"], "no_request"),
        (['{"country": "Peru"}', '{"request": 3}'], "no_request"),
    ],
)
async def test_other_drafts_are_counted_by_their_reason(replies: list[Any], reason: str) -> None:
    async with serving(replies) as script:
        drafter = await drafter_of(script, 1)
    assert not drafter.drafts and +drafter.left_out == {reason: 1}


async def test_a_call_is_used_once() -> None:
    async with serving(['{"country": "Peru"}', ASKED, *['{"country": "Peru"}'] * 4]) as script:
        drafter = await drafter_of(script, 2)
    assert len(drafter.drafts) == 1 and +drafter.left_out == {"repeated": 1}
    assert script.bodies[2]["messages"] == script.bodies[0]["messages"]
    assert "Peru" in script.bodies[3]["messages"][-1]["content"]


async def test_a_server_without_schemas_is_asked_without_them() -> None:
    async with serving([400, 'Sure: {"country": "Peru"}.', 400, ASKED]) as script:
        drafter = await drafter_of(script, 1)
    assert len(drafter.drafts) == 1
    assert ["response_format" in body for body in script.bodies] == [True, False] * 2


async def test_a_model_that_does_not_answer_is_an_error() -> None:
    async with serving([500]) as script:
        with pytest.raises(openai.InternalServerError):
            await drafter_of(script, 1)


def test_a_request_names_all_arguments() -> None:
    arguments = {"from": "Peru", "days": 3, "tags": ["a"]}
    assert complete("3 days in\n peru", arguments) == '3 days in peru (tags: ["a"])'
    assert complete("Hi", {}) == "Hi"
    assert len(complete("x" * 10_000, {})) < 500
    assert json.loads(complete("", {"n": None}).split(": ")[1][:-1]) is None


def test_tools_take_turns() -> None:
    functions = [{"function": {"name": name}} for name in "ab"]
    tasks = Drafter("", functions).tasks(3)
    assert [task["tool"] for task in tasks] == ["a", "b", "a"]
    assert len({task["id"] for task in tasks}) == 3
