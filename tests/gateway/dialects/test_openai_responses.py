"""Tests of OpenAI's responses: input items, output items and events, and conversations by id."""

import asyncio
import itertools
import json
from typing import Any

import openai
import pytest
from gateway_bench import Bench, Connect
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import Answer, AnswerBuilder, Delta
from lightning_jax.gateway.dialects.base import ReplyContext, Sender
from lightning_jax.gateway.dialects.openai_responses.dialect import LOGPROBS, parse
from lightning_jax.gateway.dialects.openai_responses.input import read_input
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.prompt.tool_calls import CallArguments, CallStart, Piece, TextPiece
from lightning_jax.gateway.request import PolicyRequest, ToolChoice
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.types import LLM, Message

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "policy", "input": "Hi.", "max_output_tokens": 8}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "go",
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["a", "b"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
TOOLS: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "output": ""}
PREVIOUS = "previous_response_id"
AS_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "input_text", "text": "x"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def _sender() -> Sender:
    return Sender({}, {}, {}, "tiny", SavedConversations())


def _messages(items: Any) -> tuple[Message, ...]:
    return read_input(items).messages


def _parse(**fields: Any) -> PolicyRequest:
    return parse(BODY | fields, _sender()).request


def _extras(model: Any) -> set[str]:
    """Return the names of fields, at any depth, that the client's types do not have."""
    if isinstance(model, list):
        return set().union(*map(_extras, model))
    if not hasattr(model, "model_extra"):
        return set()
    return set(model.model_extra or {}).union(*map(_extras, vars(model).values()))


def _checked(body: Any) -> Response:
    """Return the response, checked to match the client's types with no extra fields."""
    response = Response.model_validate(body)
    assert _extras(response) == set()
    return response


async def _post(bench: Bench, base: str | None = None, **fields: Any) -> Response:
    status, reply, _ = await bench.post(BODY | fields, base=base, path=PATH)
    assert status == 200, reply
    return _checked(reply)


async def _events(bench: Bench, base: str | None = None, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each checked as far as a client can see."""
    url = (base or f"{bench.gateway.url}/v1").removesuffix("/v1") + PATH
    headers = {"Authorization": "Bearer right-key"}
    async with bench.http.post(
        url, json=BODY | {"stream": True} | fields, headers=headers
    ) as response:
        blocks = (await response.text()).strip().split("\n\n")
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        if event["type"] != "error":
            assert _extras(EVENTS.validate_python(event)) == set()
        events.append(event)
    return events


def _reply(pieces: list[list[Piece]], reason: Any = "stop", **fields: Any) -> Any:
    """Return (whole body, events, the message a client sends back) for a hand-made answer."""
    builder = AnswerBuilder(0)
    deltas: list[Delta] = [builder.add(some, None) for some in pieces]
    answer: Answer = builder.answer((1,), Completion((5,), "", (-1.0,), (-1.0,), (1,), reason))
    context = ReplyContext("ab12", 1, ((1,),), tiny_tokenizer())
    body = parse(BODY | fields, _sender()).begin(context).body([answer])
    reply = parse(BODY | fields, _sender()).begin(context)
    events = [*reply.opening()]
    for delta in deltas:
        events += reply.delta(delta)
    events += reply.ending([answer])
    return body, events, answer.as_message()


async def test_an_answer_is_a_message(bench: Bench) -> None:
    base = bench.rollout().base_url
    fields = {"instructions": "Be brief.", "metadata": {"agent": "writer"}, "temperature": 0.5}
    response = await _post(bench, base, **fields)
    (transition,), _ = spans_to_transitions(bench.store.spans("r1"))
    assert transition.agent == "writer"
    tokenizer = bench.model.tokenizer
    assert tokenizer.decode(transition.prompt_token_ids, skip_special=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert response.output_text == tokenizer.decode(transition.response_token_ids)
    assert response.usage and response.usage.input_tokens == len(transition.prompt_token_ids)
    assert response.usage.output_tokens == len(transition.response_token_ids) <= 8
    assert {key: getattr(response, key) for key in fields} == fields
    (item,) = response.output
    cut = transition.finish_reason == "length"
    assert item.type == "message" and response.id.startswith("resp_")
    assert response.status == item.status == ("incomplete" if cut else "completed")
    reason = response.incomplete_details and response.incomplete_details.reason
    assert reason == ("max_output_tokens" if cut else None)


async def test_token_ids_and_logprobs_only_when_asked_for(bench: Bench) -> None:
    base = bench.rollout().base_url
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await _post(bench, base, **asked)
    (transition,), _ = spans_to_transitions(bench.store.spans("r1"))
    entries = response.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert [e.logprob for e in entries] == list(transition.behavior_logprobs)  # type: ignore[union-attr]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)  # type: ignore[union-attr]
    status, reply, _ = await bench.post(BODY | {"return_token_ids": True}, base=base, path=PATH)
    transition = spans_to_transitions(bench.store.spans("r1"))[0][1]
    assert status == 200 and reply["token_ids"] == list(transition.response_token_ids)
    assert reply["prompt_token_ids"] == list(transition.prompt_token_ids)


async def test_a_stream_says_what_a_whole_answer_says(bench: Bench) -> None:
    fields: dict[str, Any] = {"seed": 3, "top_logprobs": 1, "max_output_tokens": 30}
    whole = await _post(bench, **fields)
    events = await _events(bench, **fields)
    kinds = [event["type"] for event in events]
    head = ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[:4] == [*head, "response.content_part.added"]
    tail = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-4:] == [*tail, f"response.{whole.status}"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    deltas = events[4:-4]
    assert "".join(event["delta"] for event in deltas) == whole.output_text
    last = _checked(events[-1]["response"])
    assert last.usage and whole.usage
    assert last.usage.input_tokens_details.cached_tokens == whole.usage.input_tokens - 1
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert last.output_text == whole.output_text
    logprobs = [entry for event in deltas for entry in event["logprobs"]]
    assert logprobs == events[-4]["logprobs"] and len(logprobs) == whole.usage.output_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("way", ["items", "items without ids", "id of the response"])
async def test_a_tool_conversation_extends_token_for_token(
    bench: Bench, streamed: bool, way: str
) -> None:
    base = bench.rollout().base_url
    items: list[Any] = [{"role": "user", "content": "Where?"}]
    fields: dict[str, Any] = {"input": items}
    for choice, limit in (("required", 99), ("auto", 9), ("auto", 9)):
        fields |= {**TOOLS, "tool_choice": choice, "max_output_tokens": limit}
        if streamed:
            response = _checked((await _events(bench, base, **fields))[-1]["response"])
        else:
            response = await _post(bench, base, **fields)
        (item,) = response.output
        new: list[Any] = [{"role": "user", "content": "And?"}]
        if choice == "required":
            assert item.type == "function_call" and response.status == "completed"
            assert json.loads(item.arguments)["to"] in ("a", "b")
            new = [{"type": "function_call_output", "call_id": item.call_id, "output": "ok"}]
        sent = item.to_dict()
        if way == "items without ids":
            del sent["id"]
        items = [*items, {"type": "reasoning", "id": "rs_1", "summary": []}, sent, *new]
        fields = {"input": items}
        if way == "id of the response":
            fields = {"input": new, "previous_response_id": response.id}
    transitions, _ = spans_to_transitions(bench.store.spans("r1"))
    assert len(transitions) == 3
    for earlier, later in itertools.pairwise(transitions):
        path = earlier.prompt_token_ids + earlier.response_token_ids
        assert later.prompt_token_ids[: len(path)] == path
    assert bench.gateway.stats()["serve/prefix_breaks"] == 0


async def test_instructions_are_of_one_request(bench: Bench) -> None:
    first = await _post(bench, instructions="Be brief.")
    second = await _post(bench, input="More.", previous_response_id=first.id)
    assert second.previous_response_id == first.id and second.instructions is None
    spans = bench.store.spans(None)
    prompt = bench.model.tokenizer.decode(spans[-1].attributes["lightning.prompt_token_ids"])
    assert "Be brief" not in prompt and prompt.startswith("user\nHi.")
    third = await _post(bench, input="More.", previous_response_id=second.id)
    assert third.usage and second.usage and third.usage.input_tokens > second.usage.input_tokens


@pytest.mark.parametrize("store", [True, False])
async def test_only_what_was_stored_in_this_rollout_is_found(bench: Bench, store: bool) -> None:
    base = bench.rollout().base_url
    response = await _post(bench, base, store=store)
    body = BODY | {"previous_response_id": response.id}
    for where, found in ((base, store), (None, False)):
        status, reply, _ = await bench.post(body, base=where, path=PATH)
        assert status == (200 if found else 400)
        assert found or reply["error"]["code"] == "previous_response_not_found"
        assert found or reply["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_is_read_again_until_it_is_deleted(bench: Bench, stream: bool) -> None:
    llm, asked = bench.rollout(), TOOLS | {"max_output_tokens": 64}
    if stream:
        made = _checked((await _events(bench, llm.base_url, **asked))[-1]["response"])
    else:
        made = await _post(bench, llm.base_url, **asked)
    assert made.output[0].type == "function_call"
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        found = await client.responses.retrieve(made.id)
        assert found.to_dict() == made.to_dict() and _extras(found) == set()
        await client.responses.delete(made.id)
        for again in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError) as refused:
                await again(made.id)
            assert refused.value.code == "response_not_found"
            assert refused.value.param == "response_id"


async def test_a_saved_response_has_no_logprobs_and_comes_whole(bench: Bench) -> None:
    asked = BODY | {"include": [LOGPROBS], "return_token_ids": True}
    _, made, _ = await bench.post(asked, path=PATH)
    options: dict[str, Any] = {"base_url": f"{bench.gateway.url}/v1", "max_retries": 0}
    async with openai.AsyncOpenAI(api_key="right-key", **options) as client:
        (part,) = made["output"][0]["content"]
        assert len(part["logprobs"]) == len(made.pop("token_ids")) and made.pop("prompt_token_ids")
        part["logprobs"] = []
        assert (await client.responses.retrieve(made["id"])).to_dict() == made
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.retrieve(made["id"], include=[LOGPROBS])
        assert refused.value.param == "include"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.retrieve(made["id"], stream=True)
        assert refused.value.param == "stream"
    async with openai.AsyncOpenAI(api_key="wrong", **options) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.responses.delete(made["id"])


def test_text_and_calls_become_items_one_after_the_other() -> None:
    pieces: list[list[Piece]] = [
        [TextPiece(" ")],
        [TextPiece("I lo")],
        [TextPiece("ok.\n"), CallStart(0, "f")],
        [CallArguments(0, '{"a"'), CallArguments(0, ": 1}")],
        [CallStart(1, "g"), CallArguments(1, "{}")],
    ]
    body, events, message = _reply(pieces)
    response = _checked(body)
    assert [item.type for item in response.output] == ["message", *["function_call"] * 2]
    assert [item.id for item in response.output] == ["msg_ab12_0", "fc_ab12_1", "fc_ab12_2"]
    assert response.output_text == " I look.\n" and response.output[1].arguments == '{"a": 1}'  # type: ignore[union-attr]
    assert events[-1]["response"] == body
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == body["output"]
    arguments = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert arguments == ['{"a"', ": 1}", "{}"]
    # Every item is closed before the next one opens.
    marks = [e["type"].rpartition(".")[2] for e in events if "output_item" in e["type"]]
    assert marks == ["added", "done"] * 3
    assert _messages(body["output"]) == (message,)
    nameless = [{key: v for key, v in item.items() if key != "id"} for item in body["output"]]
    assert _messages(nameless) == (message,)
    # Some clients put the results between the calls.
    results = [{"type": "function_call_output", "call_id": c, "output": ""} for c in "ab"]
    mixed = [*body["output"][:2], results[0], body["output"][2], results[1]]
    assert _messages(mixed)[0] == message and len(_messages(mixed)) == 3


@pytest.mark.parametrize(
    ("pieces", "types"),
    [
        ([], ["message"]),
        ([TextPiece("  ")], ["message"]),
        ([TextPiece(" \n"), CallStart(0, "f"), CallArguments(0, "{}")], ["function_call"]),
        (
            [CallStart(0, "f"), CallArguments(0, "{}"), TextPiece("so")],
            ["function_call", "message"],
        ),
    ],
)
def test_blanks_are_text_only_where_there_is_no_call(pieces: list[Piece], types: list[str]) -> None:
    body, events, message = _reply([[piece] for piece in pieces])
    streamed = events[-1]["response"]["output"]
    assert [item["type"] for item in streamed] == types
    assert sorted(item["type"] for item in body["output"]) == sorted(types)
    for output in (streamed, body["output"]):
        (rebuilt,) = _messages(output)
        assert rebuilt.get("tool_calls") == message.get("tool_calls")
        assert rebuilt["content"].strip() == message["content"].strip()
    assert _checked(body).output_text == (
        "" if "function_call" in types else message["content"]
    ) or ("message" in types)


def test_a_cut_answer_is_incomplete() -> None:
    body, events, _ = _reply([[CallStart(0, "f"), CallArguments(0, '{"a')]], "length")
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"] == body
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in body["output"]] == ["incomplete"]
    _checked(body)


def test_items_become_messages() -> None:
    text = {"type": "output_text", "text": "Hel", "annotations": []}
    assert _messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [PART]},
            {"role": "assistant", "content": [text, text | {"text": "lo"}]},
            {"role": "assistant", "content": "again"},
            {"type": "reasoning", "summary": []},
            CALL,
            {"type": "function_call_output", "call_id": "c1", "output": [PART]},
            CALL | {"id": "fc_1_0"},
            CALL | {"id": "fc_2_0"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        ]
    ) == (
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "Hello"},
        {"role": "assistant", "content": "again", "tool_calls": [AS_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [AS_CALL]},
        {"role": "assistant", "content": "no", "tool_calls": [AS_CALL]},
    )  # fmt: skip


def test_tool_choices() -> None:
    tools = [TOOL, TOOL | {"name": "g", "description": None, "parameters": None}]
    choices = {
        "auto": ToolChoice(),
        "required": ToolChoice("required"),
        "none": ToolChoice("none"),
    }
    for choice, meant in choices.items():
        assert _parse(tools=tools, tool_choice=choice).tool_choice == meant
    named = _parse(tools=tools, tool_choice={"type": "function", "name": "g"})
    assert named.tool_choice == ToolChoice("required", ("g",))
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "g"}],
    }
    request = _parse(tools=tools, tool_choice=allowed, parallel_tool_calls=False)
    assert request.tool_choice == ToolChoice("auto", ("g",)) and not request.parallel_tool_calls
    assert [function.name for function in request.functions] == ["go", "g"]


def test_text_formats() -> None:
    schema = {"type": "object"}
    spec = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert _parse(text={"format": spec}).output_schema == schema
    assert _parse(text={"format": {"type": "json_object"}}).output_schema == {}
    assert _parse(text={"format": {"type": "text"}, "verbosity": "low"}).output_schema is None
    for form in (spec, {"type": "json_object"}, None):
        body, _, _ = _reply([], text={"format": form})
        assert _checked(body).text


def test_variables_for_the_chat_template_arrive() -> None:
    off = {"enable_thinking": False}
    assert _parse(chat_template_kwargs=off).chat_template_kwargs == off
    assert _parse(reasoning={"effort": "none"}).chat_template_kwargs == off


def test_harmless_fields_change_nothing() -> None:
    harmless = {
        **{"truncation": "auto", "user": "u", "reasoning": {"effort": "low"}, "store": False},
        **{"prompt_cache_key": "k", "service_tier": "auto", "max_tool_calls": 3},
        **{"include": ["reasoning.encrypted_content"], "background": False},
        **{"stream_options": {"include_obfuscation": False}, "conversation": None},
    }
    assert _parse(**harmless) == _parse()
    body, _, _ = _reply([], **harmless)
    assert _checked(body).truncation == "auto"


@pytest.mark.parametrize(
    ("fields", "param", "key", "reason"),
    [
        ({"input": None}, "input", "input", "wrong_type"),
        ({"input": []}, "input", "input", "wrong_type"),
        ({"input": ["hi"]}, "input", "input[0]", "wrong_type"),
        ({"input": [{"role": "x", "content": ""}]}, "input", "input[0].role", "unknown"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content", "missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "input[0].content[0].type",
            "unknown",
        ),
        ({"input": [{"type": "item_reference"}]}, "input", "input[0].type", "unknown"),
        ({"input": [CALL | {"arguments": {}}]}, "input", "input[0].arguments", "wrong_type"),
        ({"input": [OUTPUT]}, "input", "input[0].call_id", "missing"),
        ({"input": [{"type": ["x"]}]}, "input", "input[0].type", "unknown"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools", "tools[0].type", "unsupported"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name", "missing"),
        ({"tools": [TOOL | {"strict": "no"}]}, "tools", "tools[0].strict", "wrong_type"),
        ({"tool_choice": "required"}, "tools", "tools", "empty"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "tool_choice", "unknown"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}},
            "tool_choice",
            "tool_choice",
            "unknown",
        ),
        ({"background": True}, "background", "background", "unsupported"),
        ({"conversation": "conv_1"}, "conversation", "conversation", "unsupported"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt", "unsupported"),
        ({"previous_response_id": ["x"]}, PREVIOUS, PREVIOUS, "wrong_type"),
        ({"previous_response_id": "resp_1"}, PREVIOUS, PREVIOUS, "previous_response_not_found"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format.type", "unknown"),
        (
            {"text": {"format": {"type": "json_schema"}}},
            "text.format",
            "text.format.schema",
            "missing",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens", "out_of_range"),
        ({"top_logprobs": 21}, "top_logprobs", "top_logprobs", "out_of_range"),
        ({"metadata": {"a": 1}}, "metadata", "metadata", "wrong_type"),
        ({"truncation": "left"}, "truncation", "truncation", "unknown"),
        ({"instructions": ["x"]}, "instructions", "instructions", "wrong_type"),
        ({"include": [1]}, "include", "include[0]", "wrong_type"),
        ({"stream": 1}, "stream", "stream", "wrong_type"),
        ({"model": "gpt-5"}, "model", "model", "model_not_found"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, key: str, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        _parse(**fields)
    assert (caught.value.param, caught.value.key, caught.value.reason) == (param, key, reason)


async def test_errors_name_this_dialects_fields(bench: Bench) -> None:
    _, reply, _ = await bench.post(BODY | {"input": "x" * 600}, path=PATH)
    assert reply["error"]["param"] == "input"
    assert reply["error"]["code"] == "context_length_exceeded"
    spec = {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}
    status, reply, _ = await bench.post(BODY | {"text": {"format": spec}}, path=PATH)
    assert (status, reply["error"]["param"]) == (400, "text.format")
    _, reply, _ = await bench.post(BODY | {"max_output_tokens": 0}, path=PATH)
    assert reply["error"]["param"] == "max_output_tokens"
    assert "max_output_tokens" in reply["error"]["message"]


async def test_a_broken_stream_ends_in_an_error(bench: Bench, connect: Connect) -> None:
    llm = bench.rollout()
    fields: dict[str, Any] = {"max_output_tokens": 480, "logit_bias": {"258": -100}}
    reading = asyncio.create_task(_events(bench, llm.base_url, **fields))
    with pytest.raises(openai.APIError) as caught:
        async with connect(llm).responses.stream(
            model="policy", input="Hi.", extra_body=fields
        ) as stream:
            while bench.loop.stats()["serve/running"] < 2:
                await asyncio.sleep(0.01)
            bench.loop.close()
            await stream.until_done()
    assert caught.value.code == "engine_error"
    last = (await reading)[-1]
    assert (last["type"], last["code"]) == ("error", "engine_error")
    assert bench.gateway.close_rollout("r1").unanswered == ("engine_error",) * 2


async def test_a_refused_stream_has_a_status(bench: Bench, connect: Connect) -> None:
    client = connect(LLM(f"{bench.gateway.url}/v1", "right-key", "policy"))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="policy", input="x" * 600, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    assert "511" in str(caught.value)
