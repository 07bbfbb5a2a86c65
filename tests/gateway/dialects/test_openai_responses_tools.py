"""Tests of tools in OpenAI's responses: those of a namespace, custom ones, and tools as items."""

import itertools
import json
from typing import Any

import pytest
from gateway_bench import Bench
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import AnswerBuilder
from lightning_jax.gateway.dialects.base import ReplyContext, Sender
from lightning_jax.gateway.dialects.openai_responses.dialect import parse
from lightning_jax.gateway.dialects.openai_responses.input import read_input
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.prompt.tool_calls import CallArguments, CallStart
from lightning_jax.gateway.request import Function, PolicyRequest, ToolChoice
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces.convert import spans_to_transitions

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "policy", "input": "Hi.", "max_output_tokens": 8}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SENDER = Sender({}, {}, {}, "tiny", SavedConversations())


def _function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA} | fields


def _space(name: str, *tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "A group.", "tools": list(tools)}


PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"},
}
AGENTS = _space("agents", _function("spawn"), _function("wait"), {"type": "web_search"})
SHELL = _function("shell")


def _parse(**fields: Any) -> PolicyRequest:
    return parse(BODY | fields, SENDER).request


def _reply(name: str, arguments: list[str], **fields: Any) -> tuple[Response, list[Any]]:
    """Return the body and the events for one call, checked as a client reads them."""
    builder = AnswerBuilder(0)
    deltas = [builder.add([CallStart(0, name)], None)]
    deltas += [builder.add([CallArguments(0, text)], None) for text in arguments]
    answer = builder.answer((1,), Completion((5,), "", (-1.0,), (-1.0,), (1,), "stop"))
    context = ReplyContext("ab12", 1, ((1,),), tiny_tokenizer())
    body = parse(BODY | fields, SENDER).begin(context).body([answer])
    reply = parse(BODY | fields, SENDER).begin(context)
    events = [*reply.opening(), *itertools.chain(*map(reply.delta, deltas))]
    events += reply.ending([answer])
    assert events[-1]["response"] == body
    numbered = [event | {"sequence_number": index} for index, event in enumerate(events)]
    for event in numbered:
        EVENTS.validate_python(event)
    return Response.model_validate(body), events


def test_functions_of_a_namespace_are_offered() -> None:
    request = _parse(tools=[SHELL, AGENTS, _space("mcp__x__", _function("go"))])
    names = [function.name for function in request.functions]
    assert names == ["shell", "agents__spawn", "agents__wait", "mcp__x__go"]
    assert [f.description for f in request.functions] == ["", "A group.", "", "A group."]
    assert all(function.parameters == SCHEMA for function in request.functions)
    assert request.left_out == ("web_search",)


def test_a_call_names_its_namespace() -> None:
    response, _ = _reply("agents__spawn", ['{"a"', ": true}"], tools=[AGENTS])
    (item,) = response.output
    assert item.type == "function_call"
    assert (item.namespace, item.name, item.arguments) == ("agents", "spawn", '{"a": true}')
    ((message,), plain) = read_input([item.to_dict()]).messages, response.output[0].to_dict()
    assert message["tool_calls"][0]["function"]["name"] == "agents__spawn"
    assert [tool.to_dict() for tool in response.tools] == [
        AGENTS
        | {"tools": [tool | {"strict": False, "description": None} for tool in AGENTS["tools"][:2]]}
    ]
    assert "namespace" not in _reply("shell", ["{}"], tools=[SHELL])[0].output[0].to_dict()
    assert str(plain["id"]).startswith("fc_")


def test_a_custom_tool_gets_text() -> None:
    request = _parse(tools=[PATCH])
    (function,) = request.functions
    assert function.name == "patch" and "start: WORD" in function.description
    assert function.parameters is not None and function.parameters["required"] == ["input"]
    response, events = _reply("patch", ['{"input": "a', '\\nb"}'], tools=[_space("s", PATCH)])
    assert response.output[0].type == "function_call"  # `patch` is not in a namespace
    response, events = _reply("patch", ['{"input": "a', '\\nb"}'], tools=[PATCH])
    (item,) = response.output
    assert item.type == "custom_tool_call" and (item.name, item.input) == ("patch", "a\nb")
    kinds = [event["type"] for event in events[2:-1]]
    assert kinds == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    call, returned = read_input([item.to_dict(), result]).messages
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"input": "a\nb"}
    assert returned == {"role": "tool", "tool_call_id": item.call_id, "content": "done"}


def test_arguments_without_the_text_of_a_custom_tool_arrive_whole() -> None:
    for arguments in ('{"inp', "{}", '{"input": 1}'):
        (item,) = _reply("patch", [arguments], tools=[PATCH])[0].output
        assert item.type == "custom_tool_call" and item.input == arguments


def test_input_items_add_tools() -> None:
    more = _function("shell", description="newer")
    item = {"type": "additional_tools", "role": "developer", "tools": [_space("f", PATCH), more]}
    request = _parse(tools=[SHELL, AGENTS], input=[item, {"role": "user", "content": "Hi."}])
    assert [(f.name, f.description) for f in request.functions] == [
        ("agents__spawn", "A group."),
        ("agents__wait", ""),
        ("f__patch", request.functions[2].description),
        ("shell", "newer"),
    ]
    assert request.messages == ({"role": "user", "content": "Hi."},)
    chosen = {"type": "custom", "name": "patch", "namespace": "f"}
    assert _parse(input=[item], tool_choice=chosen).tool_choice == ToolChoice(
        "required", ("f__patch",)
    )


@pytest.mark.parametrize(
    ("tool", "key", "reason"),
    [
        (_space("f", {"type": "function"}), "tools[0].tools[0].name", "missing"),
        (_space("f", _space("g")), "tools[0].tools[0]", "unknown"),
        (_space("f", *[{"type": "custom", "name": "x"}] * 257), "tools[0].tools", "too_many"),
        (_space("f", *[{"type": "custom", "name": "x"}] * 2), "tools", "duplicate"),
        ({"type": "namespace", "name": "f"}, "tools[0].tools", "missing"),
        ({"type": "custom"}, "tools[0].name", "missing"),
        ({"type": "local_shell"}, "tools[0].type", "unsupported"),
        ({"type": "web_search\r\nX-A: b"}, "tools[0].type", "unsupported"),
        ("shell", "tools[0]", "wrong_type"),
    ],
)
def test_a_wrong_tool_is_named(tool: Any, key: str, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        _parse(tools=[tool])
    assert (caught.value.key, caught.value.reason, caught.value.status) == (key, reason, 400)


async def test_a_conversation_with_a_namespace_extends_token_for_token(bench: Bench) -> None:
    base, items = bench.rollout().base_url, [{"role": "user", "content": "Go"}]
    space = {"type": "namespace", "name": "s", "tools": [_function("f")]}
    for choice, limit in (("required", 99), ("auto", 9)):
        fields = {"tools": [space], "tool_choice": choice, "max_output_tokens": limit}
        fields |= {"input": items, "parallel_tool_calls": False, "seed": 1, "store": False}
        status, body, _ = await bench.post(BODY | fields, base=base, path=PATH)
        assert status == 200, body
        (item,) = body["output"]
        if choice == "required":
            assert (item["namespace"], item["name"]) == ("s", "f") and body["status"] == "completed"
            kind = item["type"] + "_output"
            items += [item, {"type": kind, "call_id": item["call_id"], "output": "ok"}]
    first, second = spans_to_transitions(bench.store.spans("r1"))[0]
    path = first.prompt_token_ids + first.response_token_ids
    assert second.prompt_token_ids[: len(path)] == path
    assert bench.gateway.stats()["serve/prefix_breaks"] == 0


def test_a_function_is_what_it_was() -> None:
    assert _parse(tools=[SHELL]).functions == (Function("shell", "", SCHEMA),)
