"""LangChain's ChatOpenAI and a LangGraph agent, unchanged, over chat completions and responses.

The server's URL is in LIGHTNING_BASE, a rollout's (without /v1) in LIGHTNING_ROLLOUT, the key in
LIGHTNING_KEY.
"""

# pyright: reportMissingImports=false

import os
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

pytestmark = pytest.mark.clients

URL = f"{os.environ.get('LIGHTNING_ROLLOUT', '')}/v1"
KEY = os.environ.get("LIGHTNING_KEY", "")
both_apis = pytest.mark.parametrize("responses", [False, True])


class Verdict(BaseModel):
    """A decision."""

    color: Literal["red", "green"]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def chat_of(responses: bool) -> ChatOpenAI:
    return ChatOpenAI(
        model="policy",
        base_url=URL,
        api_key=SecretStr(KEY),
        max_retries=0,
        use_responses_api=responses,
        max_completion_tokens=200,
        stream_usage=True,
    )


@both_apis
def test_an_answer_and_a_stream(responses: bool) -> None:
    chat = chat_of(responses)
    answer = chat.invoke([("system", "Be brief."), ("user", "Hi")])
    assert isinstance(answer.text, str) and answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] <= 200
    pieces = list(chat.stream("Hi"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata and whole.usage_metadata["output_tokens"] <= 200


@both_apis
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_round_trip(responses: bool, streamed: bool) -> None:
    chat = chat_of(responses)
    # Strict: the schema is closed, so a random model cannot make up arguments without end.
    tools: dict[str, Any] = {"tools": [get_weather], "strict": True}
    caller = chat.bind_tools(**tools, tool_choice="required", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage("Paris or Rome?")]
    if streamed:
        pieces = list(caller.stream(messages))
        answer: Any = pieces[0]
        for piece in pieces[1:]:
            answer += piece
    else:
        answer = caller.invoke(messages)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome")
    messages += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert isinstance(chat.bind_tools(**tools).invoke(messages), AIMessage)


@both_apis
def test_structured_output(responses: bool) -> None:
    chat = chat_of(responses).with_structured_output(Verdict, method="json_schema")
    assert isinstance(chat.invoke("Decide."), Verdict)
    caller = chat_of(responses).with_structured_output(
        Verdict, method="function_calling", strict=True
    )
    assert isinstance(caller.invoke("Decide."), Verdict)


@both_apis
def test_a_langgraph_agent(responses: bool) -> None:
    agent = create_agent(
        chat_of(responses),
        tools=[get_weather],
        system_prompt="Help with the weather.",
        middleware=[ModelCallLimitMiddleware(run_limit=3, exit_behavior="end")],
    )
    state = agent.invoke({"messages": [HumanMessage("Paris?")]})
    assert any(isinstance(message, AIMessage) for message in state["messages"])
