"""The OpenAI Agents SDK, unchanged: with its default Responses model and with its chat model.

The server's URL is in LIGHTNING_BASE, a rollout's (without /v1) in LIGHTNING_ROLLOUT, the key in
LIGHTNING_KEY.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import openai
import pytest
from agents.items import ToolCallItem, ToolCallOutputItem
from pydantic import BaseModel

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)

pytestmark = pytest.mark.clients

URL = f"{os.environ.get('LIGHTNING_ROLLOUT', '')}/v1"
KEY = os.environ.get("LIGHTNING_KEY", "")
QUIET = RunConfig(tracing_disabled=True)
# The SDK takes a response that was cut for a failure, so a random model must come to an end soon.
END_ID = os.environ.get("LIGHTNING_END_ID", "258")  # the end of turn in the tiny test model
SHORT: dict[str, Any] = {"logit_bias": {END_ID: 2}}
MODELS = [OpenAIResponsesModel, OpenAIChatCompletionsModel]


class Verdict(BaseModel):
    """Output of an agent with an output type."""

    color: Literal["red", "green"]


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def run(work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
            return await work(client)

    return asyncio.run(main())


def agent_of(model: Any, **fields: Any) -> Agent:
    # Only the first turn must call: the SDK resets the choice after a call.
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, extra_body=SHORT)
    return Agent(
        name="weather",
        instructions="Help with the weather.",
        model=model,
        tools=[get_weather],
        model_settings=settings,
        **fields,
    )


@pytest.mark.parametrize("kind", MODELS)
def test_a_tool_round_trip(kind: Any) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        agent = agent_of(kind(model="policy", openai_client=client))
        result = await Runner.run(agent, "Paris?", max_turns=3, run_config=QUIET)
        kinds = [type(item) for item in result.new_items]
        assert kinds[:2] == [ToolCallItem, ToolCallOutputItem]
        assert isinstance(result.final_output, str)
        assert [response.usage.requests for response in result.raw_responses] == [1, 1]
        again = [*result.to_input_list(), {"role": "user", "content": "Rome?"}]
        await Runner.run(agent, again, max_turns=3, run_config=QUIET)

    run(work)


@pytest.mark.parametrize("kind", MODELS)
def test_a_streamed_round_trip(kind: Any) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        agent = agent_of(kind(model="policy", openai_client=client))
        result = Runner.run_streamed(agent, "Rome?", max_turns=3, run_config=QUIET)
        kinds = [event.data.type async for event in result.stream_events()
                 if event.type == "raw_response_event"]  # fmt: skip
        assert kinds.count("response.completed") == 2
        assert "response.function_call_arguments.delta" in kinds
        assert isinstance(result.final_output, str)

    run(work)


@pytest.mark.parametrize("kind", MODELS)
def test_an_output_type(kind: Any) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        model = kind(model="policy", openai_client=client)
        agent = Agent(name="judge", model=model, output_type=Verdict)
        result = await Runner.run(agent, "Decide.", max_turns=2, run_config=QUIET)
        assert isinstance(result.final_output, Verdict)

    run(work)


def test_the_server_keeps_the_conversation() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        agent = agent_of(OpenAIResponsesModel(model="policy", openai_client=client))
        first = await Runner.run(
            agent, "Paris?", max_turns=3, run_config=QUIET, auto_previous_response_id=True
        )
        assert first.last_response_id
        await Runner.run(
            agent,
            "And Rome?",
            max_turns=3,
            run_config=QUIET,
            previous_response_id=first.last_response_id,
        )

    run(work)
