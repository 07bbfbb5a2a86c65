"""LiteLLM against a running gateway, as an OpenAI-like server; LIGHTNING_* say where it is."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The client lives in an environment of its own.

import asyncio
import os
from typing import Any

import litellm
import pytest

pytestmark = [
    pytest.mark.clients,
    # LiteLLM turns the warnings of its own pydantic models into failed calls.
    pytest.mark.filterwarnings("default"),
]

ROLLOUT, KEY = os.environ.get("LIGHTNING_ROLLOUT", ""), os.environ.get("LIGHTNING_KEY", "")
ASK: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "enum": [2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}
FIELDS: dict[str, Any] = {
    "model": "openai/policy",
    "api_base": f"{ROLLOUT}/v1",
    "api_key": KEY,
    "max_tokens": 100,
}


def _ask(messages: list[Any] = ASK, **fields: Any) -> Any:
    return litellm.completion(messages=messages, **FIELDS, **fields)


def test_a_plain_answer() -> None:
    reply = _ask(temperature=0.7, seed=3)
    assert reply.choices[0].message.content and reply.usage.completion_tokens > 0
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_a_prompt_that_is_too_long_has_litellms_error() -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        _ask([{"role": "user", "content": "x " * 20_000}])


def test_a_stream() -> None:
    pieces = list(_ask(stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    whole: Any = litellm.stream_chunk_builder(pieces)
    assert whole.choices[0].message.content


def test_an_asynchronous_answer() -> None:
    reply: Any = asyncio.run(litellm.acompletion(messages=ASK, **FIELDS))
    assert reply.choices[0].message.content


def test_a_schema_is_followed() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    assert _ask(response_format=form).choices[0].message.content.startswith('{"a": 2, "b": ')


def test_a_tools_result_goes_back() -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    first = _ask(tools=[ADD], tool_choice=choice, parallel_tool_calls=False)
    (call,) = first.choices[0].message.tool_calls
    assert call.function.name == "add" and call.function.arguments.startswith('{"a": 2, "b": ')
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    second = _ask([*ASK, first.choices[0].message.model_dump(), result], tools=[ADD])
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_errors_have_their_types() -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        _ask(temperature=11)
    with pytest.raises(litellm.NotFoundError, match="no-such-model"):
        litellm.completion(messages=ASK, **FIELDS | {"model": "openai/no-such-model"})
