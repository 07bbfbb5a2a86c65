"""Tests of Anthropic's messages: requests, replies, and errors that name invalid fields."""

import json
import re
from typing import Any

import pytest
from gateway_bench import Bench

from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import Answer, AnswerBuilder
from lightning_jax.gateway.dialects.anthropic import parse
from lightning_jax.gateway.dialects.base import ReplyContext, Sender
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.prompt.tool_calls import CallArguments, CallStart, TextPiece
from lightning_jax.gateway.request import Function, PolicyRequest, ToolChoice
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces.convert import spans_to_transitions

SENDER = Sender({}, {}, {}, "tiny", SavedConversations())
ASK: list[Any] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "policy", "messages": ASK, "max_tokens": 9}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
RUN = {"name": "run", "input_schema": SCHEMA}
FORCED = {"type": "any", "disable_parallel_tool_use": True}


def _parse(**fields: Any) -> PolicyRequest:
    return parse(BODY | fields, SENDER).request


def _answer(text: str, *calls: tuple[str, str], **fields: Any) -> Answer:
    builder = AnswerBuilder(0)
    builder.add([TextPiece(text)], None)
    for index, (name, arguments) in enumerate(calls):
        builder.add([CallStart(index, name), CallArguments(index, arguments)], None)
    ids = tuple(tiny_tokenizer().encode(text or "x"))
    zeros = (0.0,) * len(ids)
    reason, stop = fields.get("reason", "stop"), fields.get("stop", "")
    completion = Completion(ids, text, zeros, zeros, (0,) * len(ids), reason, stop=stop)
    return builder.answer((1, 2), completion)


def _reply(**fields: Any) -> Any:
    context = ReplyContext("abc", 0, ((1, 2),), tiny_tokenizer())
    return parse(BODY | fields, SENDER).begin(context)


def test_every_field_arrives() -> None:
    request = _parse(
        **{"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "top_k": 5},
        **{"temperature": 0.5, "top_p": 0.9, "stop_sequences": ["END"], "stream": True},
        **{"tools": [RUN], "tool_choice": FORCED, "metadata": {"user_id": "u", "agent": "w"}},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
    )
    assert request.messages == ({"role": "system", "content": "a\nb"}, *ASK)
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (
        9,
        0.5,
        0.9,
        5,
    )
    assert (request.stop, request.stream, request.agent) == (("END",), True, "w")
    assert request.functions == (Function("run", "", SCHEMA),) and request.output_schema == SCHEMA
    earlier = _parse(output_format={"type": "json_schema", "schema": SCHEMA})
    assert earlier.output_schema == SCHEMA
    assert (request.tool_choice, request.parallel_tool_calls) == (ToolChoice("required"), False)
    named = {"type": "tool", "name": "run"}
    assert _parse(tools=[RUN], tool_choice=named).tool_choice == ToolChoice("required", ("run",))
    unused = _parse(tools=[RUN], tool_choice={"type": "none"})
    assert unused.functions == request.functions  # the prompt must extend the previous one
    assert unused.tool_choice == ToolChoice("none")


def test_thinking_can_be_turned_off() -> None:
    assert _parse(thinking={"type": "disabled"}).chat_template_kwargs == {"enable_thinking": False}
    assert _parse(thinking={"type": "enabled", "budget_tokens": 9}).chat_template_kwargs == {}


def test_an_answer_that_comes_back_is_the_message_it_was() -> None:
    answer = _answer("Let me see.", ("run", '{"a": 1.0}'), ("run", "{}"))
    content = _reply().body([answer])["content"]
    content.insert(0, {"type": "thinking", "thinking": "hm", "signature": ""})
    results = [
        {"type": "tool_result", "tool_use_id": call.call_id, "content": result, "is_error": bad}
        for call, result, bad in zip(
            answer.tool_calls, ("5", [{"type": "text", "text": "no"}]), (False, True), strict=True
        )
    ]
    more = {"type": "text", "text": "And?"}
    for turns in ([content], [content[:2], content[2:]]):  # in one message or in two
        history = [{"role": "assistant", "content": turn} for turn in turns]
        history.append({"role": "user", "content": [*results, more]})
        assert _parse(messages=[*ASK, *history]).messages == (
            *ASK,
            answer.as_message() | {"reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": answer.tool_calls[0].call_id, "content": "5"},
            {"role": "tool", "tool_call_id": answer.tool_calls[1].call_id, "content": "Error: no"},
            {"role": "user", "content": "And?"},
        )


def test_which_stop_sequence_it_was() -> None:
    reply = _reply(stop_sequences=["xx", "EN", "D"])
    for sequence in (None, "EN", "D"):
        message = reply.body([_answer("ab", stop=sequence or "")])
        reason = "stop_sequence" if sequence else "end_turn"
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    cut = reply.body([_answer("", ("run", '{"a": tr'), reason="length")])
    assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})


def test_a_stream_opens_one_block_at_a_time() -> None:
    reply, builder = _reply(), AnswerBuilder(0)
    pieces = [
        [TextPiece("a")],
        [TextPiece("b"), CallStart(0, "run")],
        [CallArguments(0, '{"a"')],
        [CallArguments(0, ": 1}"), CallStart(1, "run"), CallArguments(1, "{}")],
        [TextPiece("c")],
    ]
    events = [*reply.opening()]
    for piece in pieces:
        events += reply.delta(builder.add(piece, None))
    events += reply.ending([_answer("ab", ("run", "{}"))])
    shown = [(event["type"].removeprefix("content_block_"), event.get("index")) for event in events]
    block = [("start", 0), ("delta", 0), ("delta", 0), ("stop", 0)]
    block += [("start", 1), ("delta", 1), ("delta", 1), ("stop", 1)]
    block += [("start", 2), ("delta", 2), ("stop", 2), ("start", 3), ("delta", 3), ("stop", 3)]
    ends = [("message_delta", None), ("message_stop", None)]
    assert shown == [("message_start", None), *block, *ends]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("max_tokens", None, "missing"),
        ("messages", None, "wrong_type"),
        ("messages[0]", [5], "wrong_type"),
        ("messages[0].role", [{"role": "robot", "content": ""}], "unknown"),
        ("messages[0].content", [{"role": "user"}], "missing"),
        (
            "messages[0].content[0].type",
            [{"role": "user", "content": [{"type": "image"}]}],
            "unknown",
        ),
        (
            "messages[0].content[0].text",
            [{"role": "user", "content": [{"type": "text"}]}],
            "missing",
        ),
        ("messages[0].content[0].type", [{"role": "user", "content": [{"type": []}]}], "unknown"),
        ("messages", [*ASK, {"role": "assistant", "content": "a"}], "ends_with_assistant"),
        (
            "messages[0].content[0].input",
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}],
            "missing",
        ),
        ("system[0].type", [{"type": "image"}], "unknown"),
        ("tools[0].type", [{"type": "bash_20250124"}], "unsupported"),
        ("tools[0].input_schema", [{"name": "f"}], "missing"),
        ("tool_choice", {"type": "tool"}, "unknown"),
        ("tool_choice.type", {"type": []}, "unknown"),
        ("container", "c1", "unsupported"),
    ],
)
def test_the_wrong_field_is_named(key: str, value: Any, reason: str) -> None:
    field = re.split(r"[.\[]", key)[0]
    with pytest.raises(ApiError) as caught:
        _parse(**{field: value})
    assert (caught.value.key, caught.value.reason) == (key, reason)
    assert field in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, field)


async def test_a_tools_result_extends_token_for_token(bench: Bench) -> None:
    llm = bench.rollout()
    body = BODY | {"max_tokens": 90, "tools": [RUN], "tool_choice": FORCED}
    status, first, _ = await bench.post(body, base=llm.base_url, path="/v1/messages")
    assert (status, first["stop_reason"]) == (200, "tool_use")
    use = first["content"][-1]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "5"}
    history = [{"role": "assistant", "content": first["content"]}]
    body |= {"messages": [*ASK, *history, {"role": "user", "content": [result]}]}
    status, counted, _ = await bench.post(body, base=llm.base_url, path="/v1/messages/count_tokens")
    status, second, _ = await bench.post(body, base=llm.base_url, path="/v1/messages")
    assert status == 200
    one, two = spans_to_transitions(bench.store.spans("r1"))[0]
    path = one.prompt_token_ids + one.response_token_ids
    assert two.prompt_token_ids[: len(path)] == path
    usage = second["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_a_stream_says_what_a_whole_answer_says(bench: Bench) -> None:
    headers = {"x-api-key": "right-key", "anthropic-version": "2023-06-01"}
    texts, bodies = [], []
    for rollout_id in ("a", "b"):
        base = bench.rollout(rollout_id).base_url.removesuffix("/v1")
        body = BODY | {"stream": rollout_id == "b"}
        async with bench.http.post(f"{base}/v1/messages", json=body, headers=headers) as response:
            assert response.status == 200
            texts.append(await response.text())
    whole = json.loads(texts[0])
    for block in texts[1].removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        bodies.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {bodies[-1]['type']}"
    streamed = "".join(event["delta"].get("text", "") for event in bodies if "delta" in event)
    assert streamed == whole["content"][0]["text"]
    assert bodies[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert bodies[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert bodies[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


async def test_errors_and_models_use_the_dialect_format(bench: Bench) -> None:
    for change, key, status, kind in (
        ({"max_tokens": 0}, "right-key", 400, "invalid_request_error"),
        ({"model": "gpt"}, "right-key", 404, "not_found_error"),
        ({}, "wrong", 401, "authentication_error"),
    ):
        got, body, _ = await bench.post(BODY | change, path="/v1/messages", key=key)
        assert (got, body["type"], body["error"]["type"]) == (status, "error", kind)
    _, body, _ = await bench.post(BODY | {"stop_sequences": [""]}, path="/v1/messages")
    assert "stop_sequences" in body["error"]["message"]
    for version, first in (("2023-06-01", "first_id"), (None, "object")):
        headers = {"x-api-key": "right-key"} | ({"anthropic-version": version} if version else {})
        async with bench.http.get(f"{bench.gateway.url}/v1/models", headers=headers) as response:
            assert first in await response.json()
