"""Ollama's own client against a running gateway; LIGHTNING_* say where it is."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The client lives in an environment of its own.

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.clients

# It sends no key: a rollout's URL is enough.
ROLLOUT = os.environ.get("LIGHTNING_ROLLOUT", "")
ASK: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
OPTIONS = {"num_predict": 60}


class Sum(BaseModel):
    a: bool
    b: bool


ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": Sum.model_json_schema()},
}
ADD = ollama.Tool(**ADD).model_dump(exclude_none=True)  # as the client sends it


@pytest.fixture
def client() -> Iterator[ollama.Client]:
    with ollama.Client(host=ROLLOUT) as client:
        yield client


def test_a_plain_answer(client: ollama.Client) -> None:
    reply = client.chat("policy", ASK, options=OPTIONS)
    assert reply.done and reply.done_reason in ("stop", "length")
    assert reply.message.role == "assistant" and reply.message.content
    assert reply.eval_count and reply.eval_duration and reply.prompt_eval_count
    assert reply.total_duration == (reply.prompt_eval_duration or 0) + reply.eval_duration


def test_a_stream(client: ollama.Client) -> None:
    pieces = list(client.chat("policy:latest", ASK, options=OPTIONS, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces)
    assert [piece.done for piece in pieces[:-1]] == [False] * (len(pieces) - 1)
    assert pieces[-1].done and pieces[-1].eval_count


def test_an_asynchronous_stream() -> None:
    async def talk() -> list[Any]:
        async with ollama.AsyncClient(host=ROLLOUT) as client:
            chat = await client.chat("policy", ASK, options=OPTIONS, stream=True)
            return [piece async for piece in chat]

    assert asyncio.run(talk())[-1].done


def test_generate(client: ollama.Client) -> None:
    assert client.generate("policy", "hi", system="Be brief.", options=OPTIONS).response
    assert client.generate("policy", "2 + 3 =", raw=True, options=OPTIONS).response
    assert client.generate("policy").done_reason == "load"
    pieces = client.generate("policy", "hi", options=OPTIONS, stream=True, logprobs=True)
    assert all(piece.done or piece.logprobs for piece in pieces)


def test_a_schema_is_followed(client: ollama.Client) -> None:
    reply = client.chat("policy", ASK, format=Sum.model_json_schema())
    assert Sum.model_validate_json(reply.message.content or "")


def _forced_call() -> tuple[Any, Any]:
    """A reply and its call. Ollama's API cannot force one; OpenAI's can, in the same rollout."""
    body = {"model": "policy", "messages": ASK, "tools": [ADD], "tool_choice": "required"}
    for _ in range(20):  # the client strips additionalProperties, so a call may grow too long
        reply = httpx.post(
            f"{ROLLOUT}/v1/chat/completions",
            json=body | {"parallel_tool_calls": False, "max_tokens": 100},
            headers={"Authorization": f"Bearer {os.environ['LIGHTNING_KEY']}"},
            timeout=60.0,
        ).json()
        if reply["choices"][0]["finish_reason"] == "tool_calls":
            return reply, reply["choices"][0]["message"]["tool_calls"][0]["function"]
    raise AssertionError("no call came whole")


def test_a_tools_result_goes_back(client: ollama.Client) -> None:
    forced, call = _forced_call()
    arguments = json.loads(call["arguments"])
    made = ollama.Message.ToolCall.Function(name="add", arguments=arguments)
    messages = [
        *ASK,
        ollama.Message(role="assistant", tool_calls=[ollama.Message.ToolCall(function=made)]),
        {"role": "tool", "content": "5", "tool_name": "add"},
    ]
    reply = client.chat("policy", messages, tools=[ADD], options=OPTIONS)
    assert (reply.prompt_eval_count or 0) > sum(
        forced["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    )


def test_what_is_served(client: ollama.Client) -> None:
    assert next(model.model for model in client.list().models) == "policy:latest"
    assert "tools" in (client.show("policy").capabilities or [])
    assert client.ps().models[0].context_length


def test_errors_are_read(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="'no-such-model'") as caught:
        client.chat("no-such-model", ASK)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="images"):
        client.generate("policy", "hi", images=["aGk="])
