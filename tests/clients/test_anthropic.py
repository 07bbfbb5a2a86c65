"""Anthropic's own client against a running gateway; LIGHTNING_* say where it is."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The client lives in an environment of its own.

import asyncio
import os
from typing import Any

import anthropic
import pytest

pytestmark = pytest.mark.clients

ROLLOUT, KEY = os.environ.get("LIGHTNING_ROLLOUT", ""), os.environ.get("LIGHTNING_KEY", "")
ASK: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "enum": [2]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
FIELDS: Any = {"model": "policy", "max_tokens": 100, "messages": ASK}
CHOICE = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
FORCED: Any = {"tools": [ADD], "tool_choice": CHOICE}


@pytest.fixture
def client() -> Any:
    with anthropic.Anthropic(base_url=ROLLOUT, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_plain_answer(client: Any) -> None:
    message = client.messages.create(**FIELDS, system="Be brief.", stop_sequences=["e"])
    assert message.role == "assistant" and message.usage.output_tokens > 0
    assert message.stop_reason in ("end_turn", "max_tokens", "stop_sequence")
    assert (message.stop_sequence == "e") == (message.stop_reason == "stop_sequence")
    count = client.messages.count_tokens(model="policy", messages=ASK, system="Be brief.")
    assert count.input_tokens == message.usage.input_tokens


def test_a_stream(client: Any) -> None:
    with client.messages.stream(**FIELDS) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(block.text for block in message.content) == text != ""
    assert message.usage.output_tokens > 0 and message.stop_reason


def test_an_asynchronous_stream() -> None:
    async def talk() -> tuple[str, Any]:
        async with (
            anthropic.AsyncAnthropic(base_url=ROLLOUT, api_key=KEY, max_retries=0) as client,
            client.messages.stream(**FIELDS) as stream,
        ):
            text = "".join([piece async for piece in stream.text_stream])
            return text, await stream.get_final_message()

    text, message = asyncio.run(talk())
    assert "".join(block.text for block in message.content) == text != ""


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tools_result_goes_back(client: Any, streamed: bool) -> None:
    if streamed:
        with client.messages.stream(**FIELDS, **FORCED) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(**FIELDS, **FORCED)
    assert first.stop_reason == "tool_use"
    (use,) = first.content
    assert (use.type, use.name, use.input["a"]) == ("tool_use", "add", 2)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "5"}]
    messages = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(**FIELDS | {"messages": messages}, tools=[ADD])
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_a_schema_is_followed(client: Any) -> None:
    form = {"type": "json_schema", "schema": ADD["input_schema"]}
    message = client.messages.create(**FIELDS, output_config={"format": form})
    assert message.content[0].text.startswith('{"a": 2, "b": ')


def test_what_is_served(client: Any) -> None:
    assert next(model.id for model in client.models.list()) == "policy"
    assert client.models.retrieve("policy").type == "model"


def test_errors_have_their_types(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(**FIELDS | {"model": "no-such-model"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**FIELDS, extra_body={"temperature": 11})
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        client.with_options(api_key="wrong").messages.create(**FIELDS)
