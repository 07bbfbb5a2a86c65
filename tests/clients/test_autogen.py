"""AutoGen's AssistantAgent and its OpenAI client, unchanged.

The server's URL is in LIGHTNING_BASE, a rollout's (without /v1) in LIGHTNING_ROLLOUT, the key in
LIGHTNING_KEY.
"""

# pyright: reportMissingImports=false

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ToolCallRequestEvent, ToolCallSummaryMessage
from autogen_core import CancellationToken, FunctionCall
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelInfo,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

pytestmark = pytest.mark.clients

URL = f"{os.environ.get('LIGHTNING_ROLLOUT', '')}/v1"
KEY = os.environ.get("LIGHTNING_KEY", "")
INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    family="unknown",
    structured_output=True,
    multiple_system_messages=True,
)


class Verdict(BaseModel):
    """A decision."""

    color: Literal["red", "green"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


WEATHER = FunctionTool(get_weather, description="Get the weather of a city.")


def run(work: Callable[[OpenAIChatCompletionClient], Awaitable[Any]]) -> None:
    async def main() -> None:
        client = OpenAIChatCompletionClient(
            model="policy", base_url=URL, api_key=KEY, model_info=INFO, max_retries=0,
            max_tokens=120, parallel_tool_calls=False,
        )  # fmt: skip
        await work(client)
        await client.close()

    asyncio.run(main())


def test_an_answer_and_a_stream() -> None:
    async def work(client: OpenAIChatCompletionClient) -> None:
        messages: list[Any] = [UserMessage(content="Hi", source="user")]
        plain = OpenAIChatCompletionClient(
            model="policy", base_url=URL, api_key=KEY, model_info=INFO, max_tokens=8
        )
        answer = await plain.create(messages)
        assert isinstance(answer.content, str) and answer.usage.completion_tokens <= 8
        pieces = [piece async for piece in plain.create_stream(messages)]
        assert isinstance(pieces[-1], CreateResult)
        await plain.close()

    run(work)


def test_a_tool_round_trip() -> None:
    async def work(client: OpenAIChatCompletionClient) -> None:
        messages: list[Any] = [UserMessage(content="Paris?", source="user")]
        answer = await client.create(messages, tools=[WEATHER], tool_choice="required")
        assert isinstance(answer.content, list)
        (call,) = answer.content
        assert isinstance(call, FunctionCall) and call.name == "get_weather"
        token = CancellationToken()
        output = await WEATHER.run_json(json.loads(call.arguments), token)
        result = FunctionExecutionResult(
            content=str(output), call_id=call.id, name=call.name, is_error=False
        )
        messages += [
            AssistantMessage(content=answer.content, source="assistant"),
            FunctionExecutionResultMessage(content=[result]),
        ]
        second = await client.create(messages, tools=[WEATHER])
        assert second.finish_reason in ("stop", "length", "function_calls")

    run(work)


def test_a_streamed_tool_call() -> None:
    async def work(client: OpenAIChatCompletionClient) -> None:
        stream = client.create_stream(
            [UserMessage(content="Rome?", source="user")], tools=[WEATHER], tool_choice=WEATHER
        )
        last = [piece async for piece in stream][-1]
        assert isinstance(last, CreateResult) and isinstance(last.content, list)
        assert json.loads(last.content[0].arguments)["city"] in ("Paris", "Rome")

    run(work)


def test_structured_output() -> None:
    async def work(client: OpenAIChatCompletionClient) -> None:
        plain = OpenAIChatCompletionClient(
            model="policy", base_url=URL, api_key=KEY, model_info=INFO
        )
        messages: list[Any] = [UserMessage(content="Decide.", source="user")]
        answer = await plain.create(messages, json_output=Verdict)
        assert isinstance(answer.content, str) and Verdict.model_validate_json(answer.content)
        await plain.close()

    run(work)


def test_an_assistant_agent() -> None:
    async def work(client: OpenAIChatCompletionClient) -> None:
        # The agent cannot demand a call itself, so the client's settings do.
        demanding = OpenAIChatCompletionClient(
            model="policy", base_url=URL, api_key=KEY, model_info=INFO, max_tokens=120,
            parallel_tool_calls=False,
            extra_body={"tool_choice": "required"},  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
        agent = AssistantAgent("weather", demanding, tools=[get_weather], max_tool_iterations=1)
        result = await agent.run(task="Paris?")
        assert any(isinstance(message, ToolCallRequestEvent) for message in result.messages)
        assert isinstance(result.messages[-1], ToolCallSummaryMessage)
        assert "sunny" in result.messages[-1].content
        await demanding.close()

    run(work)
