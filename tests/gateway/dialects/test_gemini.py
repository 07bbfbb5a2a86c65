"""Tests of Gemini's generateContent: requests, replies, and errors that name invalid fields."""

import json
import re
from typing import Any

import pytest
from gateway_bench import Bench

from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import AnswerBuilder
from lightning_jax.gateway.dialects.base import ReplyContext, Sender
from lightning_jax.gateway.dialects.gemini.dialect import parse
from lightning_jax.gateway.dialects.gemini.schema import Schema
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.prompt.tool_calls import CallArguments, CallStart, TextPiece
from lightning_jax.gateway.request import Function, PolicyRequest, ToolChoice
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces.convert import spans_to_transitions

ASK: list[Any] = [{"role": "user", "parts": [{"text": "hi"}]}]
FEW = {"generationConfig": {"maxOutputTokens": 9}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
RUN = {"functionDeclarations": [{"name": "run", "parametersJsonSchema": SCHEMA}]}
GENERATE = "/v1beta/models/policy:generateContent"
STREAM = "/v1beta/models/policy:streamGenerateContent"


def _sender(method: str = "generateContent") -> Sender:
    return Sender({}, {"model": "policy", "method": method}, {}, "tiny", SavedConversations())


def _parse(**fields: Any) -> PolicyRequest:
    return parse({"contents": ASK} | fields, _sender()).request


@pytest.mark.parametrize("snake", [False, True])
def test_every_field_arrives_in_both_spellings(snake: bool) -> None:
    calling = {"mode": "ANY", "allowedFunctionNames": ["run"]}
    body: dict[str, Any] = {
        "contents": ASK,
        "systemInstruction": {"parts": [{"text": "Be"}, {"text": "brief."}]},
        "tools": [RUN],
        "toolConfig": {"functionCallingConfig": calling},
        "generationConfig": {"temperature": 0.5, "topP": 0.9, "topK": 5.0, "candidateCount": 2}
        | {"maxOutputTokens": 7, "stopSequences": ["a"], "seed": 3, "presencePenalty": 1}
        | {"frequencyPenalty": -1, "responseLogprobs": True, "logprobs": 2},
        "safetySettings": [],
    }
    if snake:
        camel = re.compile(r'"((?!additional)[a-z]+(?:[A-Z][a-z]*)+)":')  # but not in a JSON schema
        spelt = camel.sub(
            lambda key: re.sub("[A-Z]", lambda c: "_" + c[0].lower(), key[0]), json.dumps(body)
        )
        assert '"max_output_tokens": 7' in spelt and '"top_p"' in spelt
        body = json.loads(spelt)
    request = parse(body, _sender("streamGenerateContent")).request
    assert request.messages == (
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "hi"},
    )
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 5)
    assert (request.num_choices, request.max_tokens, request.stop) == (2, 7, ("a",))
    assert (request.seed, request.presence_penalty, request.frequency_penalty) == (3, 1, -1)
    assert (request.logprobs, request.top_logprobs, request.stream) == (True, 2, True)
    assert request.functions == (Function("run", "", SCHEMA),)
    assert request.tool_choice == ToolChoice("required", ("run",))
    none = {"functionCallingConfig": {"mode": "NONE"}}
    assert _parse(tools=[RUN], toolConfig=none).functions == request.functions
    assert _parse(tools=[RUN], toolConfig=none).tool_choice == ToolChoice("none")


def test_thinking_can_be_turned_off() -> None:
    assert _parse(
        generationConfig={"thinkingConfig": {"thinkingBudget": 0}}
    ).chat_template_kwargs == {"enable_thinking": False}
    assert (
        _parse(generationConfig={"thinkingConfig": {"thinkingBudget": 9}}).chat_template_kwargs
        == {}
    )


def test_schemas_become_json_schemas() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "any_of": {"type": "STRING", "format": "enum", "enum": ["x"], "nullable": True},
            "n": {"type": "INTEGER", "format": "int64", "minimum": 1},
            "l": {"type": "ARRAY", "items": {"any_of": [{"type": "NUMBER"}]}, "minItems": "2"},
        },
        "required": ["n"],
        "property_ordering": ["n"],
    }
    plain = Schema.read(schema).json_schema()
    assert plain == {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1},
            "any_of": {"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}]},
            "l": {"type": "array", "items": {"anyOf": [{"type": "number"}]}, "minItems": 2},
        },
        "required": ["n"],
    }
    assert list(plain["properties"]) == ["n", "any_of", "l"]
    configs: list[dict[str, Any]] = [{"responseSchema": schema}, {"responseJsonSchema": plain}]
    for config in configs:
        config["responseMimeType"] = "application/json"
        assert _parse(generationConfig=config).output_schema == plain
    config = {"responseMimeType": "application/json"}
    assert _parse(generationConfig=config).output_schema == {}


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_an_answer_that_comes_back_is_the_message_it_was(pieces: bool, ids: bool) -> None:
    builder = AnswerBuilder(0)
    calls = [CallStart(0, "run"), CallArguments(0, '{"a": 1.5}')]
    deltas = [builder.add([TextPiece("Let me ")], None), builder.add([TextPiece("see.")], None)]
    deltas.append(builder.add(calls, None))
    completion = Completion((7,), "", (0.0,), (0.0,), (0,), "stop")
    answer = builder.answer((1,), completion)
    reply = parse({"contents": ASK}, _sender()).begin(
        ReplyContext("t", 0, ((1,),), tiny_tokenizer())
    )
    events = [event for delta in deltas for event in reply.delta(delta)] + [*reply.ending([answer])]
    bodies = events if pieces else [reply.body([answer])]
    contents = [body["candidates"][0]["content"] for body in bodies]
    call = contents[-1]["parts"][-1]["functionCall"]
    contents[0]["parts"].insert(0, {"text": "hm", "thought": True})
    expected: dict[str, Any] = answer.as_message() | {"reasoning_content": "hm"}
    if not ids:
        del call["id"]
        expected["tool_calls"][0]["id"] = None
    results = [{"functionResponse": {"name": "run", "response": {"result": "5"}}}]
    results += [{"function_response": {"name": "run", "id": "i", "response": {"x": 1}}}]
    parsed = _parse(contents=[*ASK, *contents, {"role": "user", "parts": results}]).messages
    assert parsed == (
        {"role": "user", "content": "hi"},
        expected,
        {"role": "tool", "content": "5", "name": "run"},
        {"role": "tool", "content": '{"x": 1}', "name": "run", "tool_call_id": "i"},
    )


def test_numbers_that_json_cannot_write_are_cut() -> None:
    builder = AnswerBuilder(0)
    builder.add([CallStart(0, "run"), CallArguments(0, '{"a": 1e999}')], None)
    answer = builder.answer((1,), Completion((7,), "", (0.0,), (0.0,), (0,), "stop"))
    reply = parse({"contents": ASK}, _sender()).begin(
        ReplyContext("t", 0, ((1,),), tiny_tokenizer())
    )
    json.dumps(reply.body([answer]), allow_nan=False)


def _content(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"contents": [{"role": role, "parts": list(parts)}]}


@pytest.mark.parametrize(
    ("fields", "key", "reason"),
    [
        ({"contents": "hi"}, "contents", "wrong_type"),
        (_content(role="robot"), "contents[0].role", "unknown"),
        (_content({"inlineData": {}}), "contents[0].parts[0]", "not_text"),
        (_content({"text": 5}), "contents[0].parts[0].text", "wrong_type"),
        (_content({}), "contents[0].parts[0]", "not_text"),
        (
            _content({"functionCall": {}}, role="model"),
            "contents[0].parts[0].functionCall.name",
            "missing",
        ),
        (_content({"functionCall": {"name": "f"}}), "contents[0]", "wrong_role"),
        ({"tools": [{"computerUse": {}}]}, "tools[0]", "unsupported"),
        (
            {"tools": [{"functionDeclarations": [{}]}]},
            "tools[0].functionDeclarations[0].name",
            "missing",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
            "toolConfig.functionCallingConfig.mode",
            "unknown",
        ),
        ({"generationConfig": {"responseMimeType": "x/x"}}, "responseMimeType", "unknown"),
        (
            {"generationConfig": {"responseSchema": {"type": "MAP"}}},
            "responseSchema.type",
            "unknown",
        ),
        (
            {
                "generationConfig": {
                    "responseSchema": {"properties": {str(i): 1 for i in range(10**5)}}
                }
            },
            "responseSchema.properties",
            "too_many",
        ),
        (
            {"generationConfig": {"responseModalities": ["IMAGE"]}},
            "responseModalities",
            "unsupported",
        ),
        ({"generationConfig": {"candidateCount": 65}}, "candidateCount", "out_of_range"),
        ({"cachedContent": "c"}, "cachedContent", "unsupported"),
    ],
)
def test_the_wrong_field_is_named(fields: dict[str, Any], key: str, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        _parse(**fields)
    assert (caught.value.key, caught.value.reason, caught.value.status) == (key, reason, 400)


async def _ask(bench: Bench, base: str, path: str, body: Any) -> str:
    headers = {"x-goog-api-key": "right-key"}
    url = base.removesuffix("/v1") + path
    async with bench.http.post(url, json=body, headers=headers) as response:
        assert response.status == 200
        return await response.text()


async def test_both_streams_say_what_a_whole_answer_says(bench: Bench) -> None:
    config = {"maxOutputTokens": 9, "candidateCount": 2, "responseLogprobs": True, "logprobs": 2}
    body = {"contents": ASK, "generationConfig": config}
    bases = [bench.rollout(name).base_url for name in "abc"]
    whole = json.loads(await _ask(bench, bases[0], GENERATE, body))
    array = json.loads(await _ask(bench, bases[1], STREAM, body))
    lines = (await _ask(bench, bases[2], f"{STREAM}?alt=sse", body)).split("\n\n")[:-1]
    for events in (array, [json.loads(line.removeprefix("data: ")) for line in lines]):
        for index, expected in enumerate(whole["candidates"]):
            mine = [c for event in events for c in event["candidates"] if c["index"] == index]
            text = "".join(part["text"] for c in mine for part in c["content"]["parts"])
            assert text == expected["content"]["parts"][0]["text"]
            assert mine[-1]["finishReason"] == expected["finishReason"]
            ids = [
                chosen["tokenId"]
                for c in mine
                for chosen in c.get("logprobsResult", {}).get("chosenCandidates", ())
            ]
            result = expected["logprobsResult"]
            assert ids == [chosen["tokenId"] for chosen in result["chosenCandidates"]]
            assert [len(top["candidates"]) for top in result["topCandidates"]] == [2] * len(ids)
        usage = events[-1]["usageMetadata"]
        assert usage.pop("cachedContentTokenCount") == usage["promptTokenCount"] - 1
        assert usage == whole["usageMetadata"]


async def test_a_tools_result_extends_token_for_token(bench: Bench) -> None:
    base = bench.rollout().base_url
    forced = {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}
    body = {"contents": ASK, "tools": [RUN], "generationConfig": {"maxOutputTokens": 250}}
    calls: list[Any] = []
    contents = list(ASK)
    reply = json.loads(await _ask(bench, base, GENERATE, body | forced))
    contents.append(reply["candidates"][0]["content"])
    calls = [part["functionCall"] for part in contents[-1]["parts"]]
    assert {call["name"] for call in calls} == {"run"}
    parts = [{"functionResponse": {"name": "run", "response": {"result": 5}}} for _ in calls]
    body |= FEW | {"contents": [*contents, {"role": "user", "parts": parts}]}
    counted = json.loads(await _ask(bench, base, "/v1/models/policy:countTokens", body))
    reply = json.loads(await _ask(bench, base, GENERATE.replace("v1beta", "v1"), body))
    one, two = spans_to_transitions(bench.store.spans("r1"))[0]
    path = one.prompt_token_ids + one.response_token_ids
    assert two.prompt_token_ids[: len(path)] == path
    assert counted == {"totalTokens": reply["usageMetadata"]["promptTokenCount"]}


async def test_errors_and_models_use_the_dialect_format(bench: Bench) -> None:
    body = {"contents": ASK}
    for path, change, status, name in (
        (GENERATE.replace("policy", "gpt"), {}, 404, "NOT_FOUND"),
        (GENERATE, {"contents": []}, 400, "INVALID_ARGUMENT"),
        (GENERATE + "?key=wrong", {}, 401, "UNAUTHENTICATED"),
    ):
        async with bench.http.post(
            bench.gateway.url + path,
            json=body | change,
            headers={} if "key=" in path else {"x-goog-api-key": "right-key"},
        ) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"], error["status"]) == (status, status, name)
    headers = {"x-goog-api-key": "right-key"}
    for name in ("topP", "maxOutputTokens", "presencePenalty"):
        wrong = body | {"generationConfig": {name: -9}}
        async with bench.http.post(
            bench.gateway.url + GENERATE, json=wrong, headers=headers
        ) as response:
            assert name in (await response.json())["error"]["message"]
    for path, key in (
        ("/v1beta/models?key=right-key", "models"),
        ("/v1/models", "models"),
        ("/v1beta/models/policy", "inputTokenLimit"),
    ):
        async with bench.http.get(bench.gateway.url + path, headers=headers) as response:
            assert key in await response.json()


def test_names_of_types_in_capitals_are_lowered_where_a_schema_has_them() -> None:
    theirs = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": ["STRING", "null"], "enum": ["OBJECT"], "default": "STRING"},
            "l": {"type": "ARRAY", "items": {"anyOf": [{"type": "NUMBER"}, {"type": "Other"}]}},
        },
        "$defs": {"type": {"type": "BOOLEAN"}},
    }
    ours = {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["OBJECT"], "default": "STRING"},
            "l": {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "Other"}]}},
        },
        "$defs": {"type": {"type": "boolean"}},
    }
    config = {"responseMimeType": "application/json", "responseJsonSchema": theirs}
    assert _parse(generationConfig=config).output_schema == ours
    declared = {"functionDeclarations": [{"name": "f", "parametersJsonSchema": theirs}]}
    assert _parse(tools=[declared]).functions[0].parameters == ours
