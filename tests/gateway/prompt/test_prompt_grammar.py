"""Tests that required calls and JSON are produced by a policy with random weights."""

import json
from typing import Any

import numpy as np
import pytest
from gateway_bench import Bench, Connect, MakeBench
from templates import TEMPLATES, tokenizer_with

from lightning_jax.engine.grammar import GrammarCompiler, GrammarError, grammar, json_schema
from lightning_jax.gateway.prompt.grammar import closed_schema, grammar_of
from lightning_jax.gateway.prompt.tool_formats import FORMATS, ToolFormat
from lightning_jax.gateway.request import Function, PolicyRequest, ToolChoice
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces.convert import spans_to_transitions

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CITY = {"properties": {"city": {"enum": ["Rome"]}}}
SHORT = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
ASK: list[Any] = [{"role": "user", "content": "?"}]
REQUIRED = ToolChoice("required")
COMPILER = GrammarCompiler(tiny_tokenizer())


def _request(**fields: Any) -> PolicyRequest:
    return PolicyRequest("chat", "policy", messages=tuple(ASK), **fields)


def _accepts(grammar: str | None, text: str) -> bool:
    """Return whether the grammar accepts the whole text and may end there."""
    assert grammar is not None
    tokenizer = tiny_tokenizer()
    try:
        COMPILER.check(grammar)
        matcher = COMPILER.open(grammar)
        for token in tokenizer.encode(text, special=False):
            matcher.push(token)
        (end,) = tokenizer.eos_ids
        return bool(np.unpackbits(matcher.packed(), bitorder="little")[end])
    except GrammarError:
        return False


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_formats_accept_only_their_calls(form: ToolFormat) -> None:
    tokenizer = tiny_tokenizer()
    functions = (Function("weather", "", PARAMETERS), Function("clock"))
    request = _request(functions=functions, tool_choice=REQUIRED)
    weather: tuple[str, Any] = ("weather", {"city": "Oslo", "days": 3})
    clock: tuple[str, Any] = ("clock", {})
    grammar = grammar_of(request, form, tokenizer)
    for calls in ([weather], [clock], [weather, clock, weather]):
        assert _accepts(grammar, form.write(calls))
    for text in ("", "hello", form.write([("weather", {"city": "Paris", "days": 3})])):
        assert not _accepts(grammar, text)
    assert not _accepts(grammar, form.write([("fly", {})]))
    one = _request(functions=functions, tool_choice=REQUIRED, parallel_tool_calls=False)
    assert not _accepts(grammar_of(one, form, tokenizer), form.write([clock, clock]))
    named = _request(functions=functions, tool_choice=ToolChoice("required", ("clock",)))
    assert not _accepts(grammar_of(named, form, tokenizer), form.write([weather]))


def test_free_requests_have_no_grammar_and_json_leaves_room_for_calls() -> None:
    tokenizer, form = tiny_tokenizer(), FORMATS["hermes"]
    functions = (Function("clock"),)
    assert grammar_of(_request(), form, tokenizer) is None
    assert grammar_of(_request(functions=functions), form, tokenizer) is None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    both = grammar_of(_request(functions=functions, output_schema=schema), form, tokenizer)
    assert _accepts(both, '{"a": 1}') and _accepts(both, form.write([("clock", {})]))
    assert not _accepts(both, '{"a": "1"}')
    assert _accepts(grammar_of(_request(output_schema={}), form, tokenizer), '{"x": [null]}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_required_call_comes_whatever_the_weights(
    make_bench: Any, connect: Connect, name: str, stream: bool
) -> None:
    async with make_bench(tokenizer=tokenizer_with(TEMPLATES[name])) as bench:
        client = connect(bench.rollout())
        fields: dict[str, Any] = {"model": "policy", "messages": ASK, "tools": [SHORT]}
        fields |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        if stream:
            async with client.chat.completions.stream(**fields) as events:
                reply = await events.get_final_completion()
        else:
            reply = await client.chat.completions.create(**fields)
        (choice,) = reply.choices
        (call,) = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) in ({}, {"city": "Rome"})

        messages = [*ASK, choice.message.model_dump(exclude_none=True)]
        messages[-1].pop("parsed", None)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        again = fields | {"messages": messages, "tool_choice": "auto", "max_tokens": 8}
        await client.chat.completions.create(**again)
        first, second = spans_to_transitions(bench.store.spans("r1"))[0]
        path = first.prompt_token_ids + first.response_token_ids
        assert second.prompt_token_ids[: len(path)] == path
        assert any(first.forced) and not all(first.forced) and not any(second.forced)
        assert bench.gateway.stats()["serve/prefix_breaks"] == 0


async def test_a_guaranteed_call_streams_in_pieces(bench: Bench, connect: Connect) -> None:
    client = connect(bench.rollout())
    pieces, names = [], []
    stream = await client.chat.completions.create(
        model="policy",
        messages=ASK,
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        max_tokens=200,
        stream=True,
    )
    async for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.index == 0 and call.function is not None
            names += [call.function.name] * bool(call.function.name)
            pieces += [call.function.arguments] * bool(call.function.arguments)
    assert names == ["weather"] and len(pieces) > 3
    assert set(json.loads("".join(p or "" for p in pieces))) == {"city", "days"}


async def test_a_demanded_schema_is_kept(bench: Bench, connect: Connect) -> None:
    client = connect(bench.rollout())
    schema = {"name": "x", "schema": PARAMETERS, "strict": True}
    for seed in range(5):
        reply = await client.chat.completions.create(
            model="policy",
            messages=ASK,
            response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[typeddict-item]
            max_tokens=100,
            seed=seed,
        )
        answer = json.loads(reply.choices[0].message.content or "")
        assert set(answer) == {"city", "days"}
        assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_stop_strings_do_not_cut_a_guaranteed_answer(bench: Bench, path: str) -> None:
    stops = ["{", '"city"', "}", "Rome", "Oslo", "weather", ", "]
    body: dict[str, Any] = {"model": "policy", "messages": ASK, "max_tokens": 200}
    if path == "/v1/messages":
        tool = {"name": "weather", "input_schema": PARAMETERS}
        called = {"tools": [tool], "stop_sequences": stops}
        called["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        _, reply, _ = await bench.post(body | called, path=path)
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("tool_use", None)
        assert set(reply["content"][0]["input"]) == {"city", "days"}
        return
    called = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    _, reply, _ = await bench.post(body | called | {"stop": stops})
    (choice,) = reply["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    _, reply, _ = await bench.post(body | {"response_format": form, "stop": stops})
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"city", "days"}


async def test_a_schema_that_cannot_be_kept_is_refused(bench: Bench) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "unicorn"}}}
    body = {"model": "policy", "messages": ASK, "response_format": bad}
    status, reply, _ = await bench.post(body, base=bench.rollout().base_url)
    assert (status, reply["error"]["code"]) == (400, "invalid_schema")
    assert "unicorn" in reply["error"]["message"]
    assert reply["error"]["param"] == "response_format"
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "unicorn"}}}}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    del body["response_format"]
    status, reply, _ = await bench.post(body | tools, base=bench.rollout("r2").base_url)
    assert (status, reply["error"]["code"]) == (400, "invalid_schema")
    assert reply["error"]["param"] == "tools"


async def test_a_schema_that_fails_on_the_way_is_the_callers_fault(bench: Bench) -> None:
    many = {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(600)}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": many}}
    body = {"model": "policy", "messages": ASK, "response_format": wanted, "max_tokens": 20}
    status, reply, _ = await bench.post(body, base=bench.rollout().base_url)
    assert (status, reply["error"]["code"]) == (400, "invalid_schema")
    assert reply["error"]["param"] == "response_format"


def test_a_definition_that_others_build_on_stays_open() -> None:
    base = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
    inline = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    reference = {"$ref": "#/$defs/Base"}
    for schema in ({"allOf": [reference, inline]}, inline | reference):
        whole = grammar(json_schema(closed_schema(schema | {"$defs": {"Base": base}})))
        assert _accepts(whole, '{"id": 1, "name": "x"}') or _accepts(
            whole, '{"name": "x", "id": 1}'
        )
    alone = closed_schema({"properties": {"a": reference}, "$defs": {"Base": base}})
    assert alone["$defs"]["Base"]["additionalProperties"] is False


def test_objects_are_closed_where_that_is_safe() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    shut = point | {"additionalProperties": False}
    assert closed_schema(point) == shut
    assert closed_schema({"$defs": {"p": point}, "items": point}) == {
        "$defs": {"p": shut},
        "items": shut,
    }
    assert closed_schema({"anyOf": [point, {"type": "null"}]}) == {
        "anyOf": [shut, {"type": "null"}]
    }
    for schema in (
        {"allOf": [point, {"properties": {"y": {}}}]},
        point | {"additionalProperties": True},
        point | {"anyOf": [{"properties": {"y": {}}}]},
        point | {"patternProperties": {"^a": {}}},
        {"type": "object"},
        True,
    ):
        assert closed_schema(schema) == schema


async def test_long_schemas_are_refused_where_they_bind(make_bench: MakeBench) -> None:
    long = {"type": "object", "properties": {"x": {"enum": ["y" * 100] * 30}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": long}}
    body = {"model": "policy", "messages": ASK, "tools": [tool], "max_tokens": 1}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": long}}
    async with make_bench(max_grammar_kib=1, max_len=512) as bench:
        for more, param in (
            ({"tool_choice": "required"}, "tools"),
            ({"response_format": form, "tools": None}, "response_format"),
        ):
            status, reply, _ = await bench.post(body | more)
            error = reply["error"]
            assert (status, error["code"], error["param"]) == (400, "invalid_schema", param)
            assert "serve.max_grammar_kib" in error["message"]
        _, reply, _ = await bench.post(body)  # a tool that is not required needs no grammar
        assert reply.get("error", {}).get("code") != "invalid_schema"
