"""Google's own client against a running gateway; LIGHTNING_* say where it is."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The client lives in an environment of its own.

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel

pytestmark = pytest.mark.clients

ROLLOUT, KEY = os.environ.get("LIGHTNING_ROLLOUT", ""), os.environ.get("LIGHTNING_KEY", "")
ASK = "What is 2 + 3?"
FORCED = types.FunctionCallingConfig(
    mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["add"]
)


class Sum(BaseModel):
    a: bool
    b: bool


ADD = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="add",
            description="Adds.",
            parameters_json_schema=Sum.model_json_schema() | {"additionalProperties": False},
        )
    ]
)


@pytest.fixture
def client() -> Iterator[genai.Client]:
    with genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=ROLLOUT)) as client:
        yield client


def _config(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(max_output_tokens=60, **fields)


def test_a_plain_answer(client: genai.Client) -> None:
    config = _config(
        system_instruction="Be brief.", candidate_count=2, response_logprobs=True, logprobs=2
    )
    reply = client.models.generate_content(model="policy", contents=ASK, config=config)
    assert len(reply.candidates or []) == 2 and reply.text
    usage = reply.usage_metadata
    assert usage and usage.candidates_token_count and usage.prompt_token_count
    for candidate in reply.candidates or []:
        assert candidate.finish_reason in (types.FinishReason.STOP, types.FinishReason.MAX_TOKENS)
        logprobs = candidate.logprobs_result
        assert logprobs and logprobs.chosen_candidates and logprobs.top_candidates
    count = client.models.count_tokens(model="policy", contents=ASK)
    assert 0 < (count.total_tokens or 0) < usage.prompt_token_count


def test_a_stream(client: genai.Client) -> None:
    stream = client.models.generate_content_stream(model="policy", contents=ASK, config=_config())
    pieces = list(stream)
    assert "".join(piece.text or "" for piece in pieces)
    assert pieces[-1].usage_metadata and pieces[-1].candidates
    assert pieces[-1].candidates[0].finish_reason


def test_an_asynchronous_stream() -> None:
    async def talk() -> list[Any]:
        options = types.HttpOptions(base_url=ROLLOUT)
        async with genai.Client(api_key=KEY, http_options=options).aio as client:
            stream = await client.models.generate_content_stream(
                model="policy", contents=ASK, config=_config()
            )
            return [piece async for piece in stream]

    assert asyncio.run(talk())[-1].candidates[0].finish_reason


def test_a_schema_is_followed(client: genai.Client) -> None:
    for form in ({"response_schema": Sum}, {"response_json_schema": Sum.model_json_schema()}):
        config = _config(response_mime_type="application/json", **form)
        reply = client.models.generate_content(model="policy", contents=ASK, config=config)
        assert Sum.model_validate_json(reply.text or "")
        if "response_schema" in form:
            assert isinstance(reply.parsed, Sum)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tools_result_goes_back(client: genai.Client, streamed: bool) -> None:
    config = types.GenerateContentConfig(
        max_output_tokens=900,  # one answer may hold many calls
        tools=[ADD],
        tool_config=types.ToolConfig(function_calling_config=FORCED),
    )
    chat = client.chats.create(model="policy", config=config)
    if streamed:
        *_, first = chat.send_message_stream(ASK)
    else:
        first = chat.send_message(ASK)
    calls = first.function_calls or []
    assert calls and all(
        call.name == "add" and set(call.args or {}) == {"a", "b"} for call in calls
    )
    results = [
        types.Part.from_function_response(name="add", response={"result": "5"}) for _ in calls
    ]
    second = chat.send_message(results, config=_config(tools=[ADD]))
    one, two = first.usage_metadata, second.usage_metadata
    assert one and two and one.total_token_count
    assert (two.prompt_token_count or 0) > one.total_token_count


def test_what_is_served(client: genai.Client) -> None:
    assert next(model.name for model in client.models.list()) == "models/policy"
    assert client.models.get(model="policy").display_name == "policy"


def test_errors_have_their_statuses(client: genai.Client) -> None:
    with pytest.raises(errors.ClientError, match="NOT_FOUND"):
        client.models.generate_content(model="no-such-model", contents=ASK)
    with pytest.raises(errors.ClientError, match="INVALID_ARGUMENT"):
        client.models.generate_content(model="policy", contents=ASK, config=_config(temperature=11))
