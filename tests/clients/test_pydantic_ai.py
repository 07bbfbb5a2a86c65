"""Pydantic AI, unchanged, over chat completions and responses.

The server's URL is in LIGHTNING_BASE, a rollout's (without /v1) in LIGHTNING_ROLLOUT, the key in
LIGHTNING_KEY.
"""

# pyright: reportMissingImports=false

import asyncio
import os
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits

pytestmark = pytest.mark.clients

URL = f"{os.environ.get('LIGHTNING_ROLLOUT', '')}/v1"
KEY = os.environ.get("LIGHTNING_KEY", "")
END_ID = os.environ.get("LIGHTNING_END_ID", "258")  # the end of turn in the tiny test model
SHORT = ModelSettings(extra_body={"logit_bias": {END_ID: 2}}, parallel_tool_calls=False)
both_models = pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])


class Verdict(BaseModel):
    """A decision."""

    color: Literal["red", "green"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def model_of(kind: Any) -> Any:
    return kind("policy", provider=OpenAIProvider(base_url=URL, api_key=KEY))


@both_models
def test_an_answer_and_a_stream(kind: Any) -> None:
    async def work() -> None:
        agent = Agent(model_of(kind), instructions="Be brief.", model_settings=SHORT, retries=9)
        answer = await agent.run("Hi")
        assert isinstance(answer.output, str) and answer.usage.output_tokens
        async with agent.run_stream("Hi") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert isinstance("".join(pieces), str)

    asyncio.run(work())


@both_models
def test_a_tool_round_trip(kind: Any) -> None:
    """An output tool makes Pydantic AI demand a call in every turn: in the end, the verdict."""

    async def work() -> None:
        agent = Agent(
            model_of(kind),
            tools=[get_weather],
            output_type=ToolOutput(Verdict, name="decide"),
            model_settings=SHORT,
        )
        limits = UsageLimits(request_limit=20)
        result = await agent.run("Paris or Rome?", usage_limits=limits)
        assert isinstance(result.output, Verdict)
        parts = [part for message in result.all_messages() for part in message.parts]
        calls = [part for part in parts if isinstance(part, ToolCallPart)]
        returns = [part for part in parts if isinstance(part, ToolReturnPart)]
        assert {part.tool_call_id for part in calls} == {part.tool_call_id for part in returns}
        more = await agent.run(
            "And now?", message_history=result.all_messages(), usage_limits=limits
        )
        assert isinstance(more.output, Verdict)

    asyncio.run(work())


@both_models
def test_structured_output(kind: Any) -> None:
    async def work() -> None:
        agent = Agent(model_of(kind), output_type=NativeOutput(Verdict))
        assert isinstance((await agent.run("Decide.")).output, Verdict)
        async with agent.run_stream("Decide.") as stream:
            assert isinstance(await stream.get_output(), Verdict)

    asyncio.run(work())
