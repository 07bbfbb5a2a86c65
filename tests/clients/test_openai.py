"""OpenAI's Python client, unchanged: chat, completions and responses, with its typed helpers.

The server's URL is in LIGHTNING_BASE, a rollout's (without /v1) in LIGHTNING_ROLLOUT, the key in
LIGHTNING_KEY.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.clients

URL = f"{os.environ.get('LIGHTNING_ROLLOUT', '')}/v1"
KEY = os.environ.get("LIGHTNING_KEY", "")
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Verdict(BaseModel):
    """Output that a small random model can produce in a few tokens."""

    color: Literal["red", "green"]
    sure: bool


class get_weather(BaseModel):
    """Get the weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


SCHEMA = get_weather.model_json_schema()
TOOL: dict[str, Any] = {"name": "get_weather", "parameters": SCHEMA}
CHAT_TOOL: Any = {"type": "function", "function": TOOL}
FLAT_TOOL: Any = {"type": "function", "strict": False, **TOOL}


def run(work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
            return await work(client)

    return asyncio.run(main())


@pytest.fixture
def client() -> Any:
    with openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert "policy" in [model.id for model in client.models.list()]


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="policy", messages=ASK, max_completion_tokens=8)
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage and 1 <= reply.usage.completion_tokens <= 8
    chunks = list(
        client.chat.completions.create(
            model="policy", messages=ASK, max_tokens=8, stream=True, logprobs=True, top_logprobs=2
        )
    )
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_chat_tools(client: openai.OpenAI) -> None:
    chat = client.chat.completions
    first = chat.create(
        model="policy", messages=ASK, tools=[CHAT_TOOL], tool_choice="required",
        parallel_tool_calls=False, max_tokens=120,
    )  # fmt: skip
    (call,) = first.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")  # type: ignore[union-attr]
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*ASK, first.choices[0].message, answer]
    second = chat.create(model="policy", messages=messages, tools=[CHAT_TOOL], max_tokens=8)
    assert second.choices[0].finish_reason


def test_chat_parse(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model="policy", messages=ASK, response_format=Verdict)
    assert isinstance(reply.choices[0].message.parsed, Verdict)
    reply = client.chat.completions.parse(
        model="policy",
        messages=ASK,
        tools=[openai.pydantic_function_tool(get_weather)],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        parallel_tool_calls=False,
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, get_weather)


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    fields: Any = {"model": "policy", "messages": ASK, "response_format": Verdict}
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Verdict)
    assert "content.delta" in kinds and kinds[-1] == "content.done"

    async def work(client: openai.AsyncOpenAI) -> None:
        tools = [openai.pydantic_function_tool(get_weather)]
        async with client.chat.completions.stream(
            model="policy",
            messages=ASK,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        assert "tool_calls.function.arguments.done" in kinds
        for call in final.choices[0].message.tool_calls or []:
            assert isinstance(call.function.parsed_arguments, get_weather)

    run(work)


def test_completions(client: openai.OpenAI) -> None:
    fields: Any = {"model": "policy", "max_tokens": 6, "echo": True}
    prompts: list[Any] = ["once", ["once", "upon"], [65, 66], [[65], [66, 67]]]
    for prompt in prompts:
        # With echo the log-probs are the prompt's, too, which a stream could not wait for.
        reply = client.completions.create(prompt=prompt, logprobs=3, **fields)
        assert reply.choices[0].logprobs and reply.usage
        chunks = list(client.completions.create(prompt=prompt, stream=True, **fields))
        assert {choice.index for chunk in chunks for choice in chunk.choices} == set(
            range(len(reply.choices))
        )


@pytest.mark.parametrize("by_id", [False, True])
def test_responses_tools(client: openai.OpenAI, by_id: bool) -> None:
    first = client.responses.create(
        model="policy", input=ASK, instructions="Be brief.", tools=[FLAT_TOOL],
        tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = first.output
    assert first.status == "completed" and call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    before: Any = {"previous_response_id": first.id} if by_id else {}
    second = client.responses.create(
        model="policy", input=[result] if by_id else [*ASK, *first.output, result],
        instructions="Be brief.", tools=[FLAT_TOOL], max_output_tokens=16, **before,
    )  # fmt: skip
    assert second.output[0].type == "message" and second.usage
    assert second.status in ("completed", "incomplete")
    assert second.previous_response_id == (first.id if by_id else None)


def test_responses_parse(client: openai.OpenAI) -> None:
    reply = client.responses.parse(model="policy", input="Decide.", text_format=Verdict)
    assert isinstance(reply.output_parsed, Verdict)
    reply = client.responses.parse(
        model="policy",
        input=ASK,
        tools=[openai.pydantic_function_tool(get_weather)["function"] | {"type": "function"}],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "get_weather"},
        parallel_tool_calls=False,
    )
    (call,) = reply.output
    assert call.type == "function_call" and call.parsed_arguments


def test_responses_stream(client: openai.OpenAI) -> None:
    logprobs: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = list(client.responses.create(model="policy", input="Hi", stream=True, **logprobs))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(model="policy", input="Hi", text_format=Verdict) as stream:
        deltas = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == deltas[-1]

    async def work(client: openai.AsyncOpenAI) -> None:
        fields: Any = {"model": "policy", "input": ASK, "tools": [FLAT_TOOL]}
        fields |= {"tool_choice": "required", "parallel_tool_calls": False}
        async with client.responses.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        for call in final.output:
            assert call.type == "function_call" and json.loads(call.arguments)

    run(work)


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="policy", input="Hi", previous_response_id="resp_0")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="policy", prompt="a", suffix="b")
    assert caught.value.param == "suffix"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
