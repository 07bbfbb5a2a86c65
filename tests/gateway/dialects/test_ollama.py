"""Tests of Ollama's chat and generate: requests, replies, and errors that name invalid fields."""

import json
from typing import Any

import pytest
from gateway_bench import Bench

from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import AnswerBuilder
from lightning_jax.gateway.dialects.base import ReplyContext, Sender
from lightning_jax.gateway.dialects.ollama import parse_chat, parse_generate
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.prompt.messages import normalize_messages
from lightning_jax.gateway.prompt.render import ConversationMemory, Generated, Rendered
from lightning_jax.gateway.prompt.tool_calls import CallArguments, CallStart, TextPiece
from lightning_jax.gateway.request import Function, PolicyRequest
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces.convert import spans_to_transitions

SENDER = Sender({}, {}, {}, "tiny", SavedConversations())
ASK: list[Any] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "policy", "messages": ASK}
FEW = {"options": {"num_predict": 9}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
RUN = {"type": "function", "function": {"name": "run", "parameters": SCHEMA}}


def _parse(**fields: Any) -> PolicyRequest:
    return parse_chat(BODY | fields, SENDER).request


def test_every_field_arrives() -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["a"]}
    options |= {"num_predict": 7, "presence_penalty": 1, "frequency_penalty": -1, "num_ctx": 99}
    request = _parse(options=options, tools=[RUN], format="json", think=False, keep_alive="5m")
    assert (request.temperature, request.top_p, request.top_k, request.min_p) == (0.5, 0.9, 5, 0.1)
    assert (request.seed, request.stop, request.max_tokens) == (3, ("a",), 7)
    assert (request.presence_penalty, request.frequency_penalty) == (1, -1)
    assert request.stream and not _parse(stream=False).stream
    assert request.functions == (Function("run", "", SCHEMA),) and request.output_schema == {}
    assert _parse(format=SCHEMA).output_schema == SCHEMA and _parse(format="").output_schema is None
    assert _parse(options={"num_predict": -1}).max_tokens is None
    assert _parse(model="policy:latest").agent == "" and _parse(model="policy:w").agent == "w"


def test_thinking_can_be_turned_off() -> None:
    assert _parse(think=False).chat_template_kwargs == {"enable_thinking": False}
    assert _parse(think=None).chat_template_kwargs == {}


def test_generate_is_templated_unless_raw() -> None:
    body = {"model": "policy", "prompt": "hi", "system": "Be brief.", "context": [1, 2]}
    request = parse_generate(body, SENDER).request
    assert request.messages == ({"role": "system", "content": "Be brief."}, *ASK)
    raw = parse_generate({"model": "policy", "prompt": "hi", "raw": True}, SENDER).request
    assert (raw.messages, raw.prompts) == (None, ("hi",))


def test_an_answer_that_comes_back_is_recognised_without_ids() -> None:
    builder = AnswerBuilder(0)
    calls = [CallStart(0, "run"), CallArguments(0, '{"b": 1, "a": "\u00fc"}'), CallStart(1, "go")]
    builder.add([TextPiece("Hm. "), *calls, CallArguments(1, "{}")], None)
    completion = Completion((7, 8), "", (0.0, 0.0), (0.0, 0.0), (0, 0), "stop")
    answer = builder.answer((1,), completion)
    context = ReplyContext("abc", 0, ((1,),), tiny_tokenizer())
    message = parse_chat(BODY, SENDER).begin(context).body([answer])["message"]
    assert [set(call) for call in message["tool_calls"]] == [{"function"}] * 2
    result = {"role": "tool", "tool_name": "run", "content": "5"}
    parsed = _parse(messages=[*ASK, message, result]).messages
    memory, generated = ConversationMemory(), Generated(Rendered((1,), 0, 0), (7, 8))
    memory.add(answer.as_message(), generated)
    plain = normalize_messages(parsed or ())
    recalled = memory.recall(plain[1])
    assert recalled is not None and recalled.newest == generated
    assert plain[2] == {"role": "tool", "name": "run", "content": "5"}
    other = {"function": {"name": "run", "arguments": {"a": "u"}}}
    edited = normalize_messages(_parse(messages=[message | {"tool_calls": [other]}]).messages or ())
    assert memory.recall(edited[0]) is None


def test_a_call_that_was_cut_is_not_shown() -> None:
    builder = AnswerBuilder(0)
    builder.add([CallStart(0, "run"), CallArguments(0, '{"a": tr')], None)
    answer = builder.answer((1,), Completion((7,), "", (0.0,), (0.0,), (0,), "length"))
    reply = parse_chat(BODY, SENDER).begin(ReplyContext("abc", 0, ((1,),), tiny_tokenizer()))
    body = reply.body([answer])
    assert (body["message"], body["done_reason"]) == (
        {"role": "assistant", "content": ""},
        "length",
    )


@pytest.mark.parametrize(
    ("field", "value", "key", "reason"),
    [
        ("messages", "hi", "messages", "wrong_type"),
        ("messages", [{"role": "user", "content": []}], "messages[0].content", "wrong_type"),
        ("messages", [{"role": "user", "images": ["aGk="]}], "messages[0].images", "unsupported"),
        (
            "messages",
            [{"role": "assistant", "tool_calls": [{}]}],
            "messages[0].tool_calls[0].function",
            "missing",
        ),
        (
            "messages",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "wrong_type",
        ),
        ("tools", [{"type": "function"}], "tools[0].function", "missing"),
        ("format", "xml", "format", "unknown"),
        ("think", True, "think", "unsupported"),
        ("options", {"repeat_penalty": 1.1}, "repeat_penalty", "unsupported"),
        ("options", {"temperature": "hot"}, "temperature", "wrong_type"),
        ("top_logprobs", 21, "top_logprobs", "out_of_range"),
    ],
)
def test_the_wrong_field_is_named(field: str, value: Any, key: str, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        _parse(**{field: value})
    assert (caught.value.key, caught.value.reason, caught.value.status) == (key, reason, 400)


async def _ask(bench: Bench, base: str, body: Any, path: str = "/api/chat") -> tuple[Any, str]:
    """Send a request without a key, as Ollama's client does."""
    async with bench.http.post(base.removesuffix("/v1") + path, json=body) as response:
        return response, await response.text()


async def test_a_stream_of_lines_says_what_a_whole_answer_says(bench: Bench) -> None:
    body = BODY | FEW | {"logprobs": True, "top_logprobs": 2}
    for path, key, read in (
        ("/api/chat", "messages", lambda line: line["message"]["content"]),
        ("/api/generate", "prompt", lambda line: line["response"]),
    ):
        body |= {"prompt": "hi"} if key == "prompt" else {}
        one, two = (bench.rollout(name + key).base_url for name in "ab")
        _, text = await _ask(bench, one, body | {"stream": False}, path)
        whole = json.loads(text)
        response, text = await _ask(bench, two, body, path)
        assert response.content_type == "application/x-ndjson"
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert "".join(map(read, lines)) == read(whole)
        streamed = [entry for line in lines for entry in line.get("logprobs", ())]
        assert [e["token"] for e in streamed] == [e["token"] for e in whole["logprobs"]]
        for last in (whole, lines[-1]):
            assert last["eval_count"] == len(whole["logprobs"]) and last["load_duration"] == 0
            parts = last["prompt_eval_duration"], last["eval_duration"]
            assert min(parts) > 0 and sum(parts) == last["total_duration"]


async def test_a_tools_result_extends_token_for_token(bench: Bench) -> None:
    llm = bench.rollout()
    # Ollama's API cannot force a call; OpenAI's can, in the same conversation.
    forced = {"tools": [RUN], "tool_choice": "required", "parallel_tool_calls": False}
    _, first, _ = await bench.post(BODY | forced, base=llm.base_url)
    function = first["choices"][0]["message"]["tool_calls"][0]["function"]
    call = {"function": {"name": "run", "arguments": json.loads(function["arguments"])}}
    messages = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_name": "run", "content": "5"}]
    for _ in range(2):
        body = BODY | FEW | {"messages": messages, "tools": [RUN], "stream": False}
        response, text = await _ask(bench, llm.base_url, body)
        assert response.status == 200
        messages += [json.loads(text)["message"], *ASK]
    one, two, three = spans_to_transitions(bench.store.spans("r1"))[0]
    for earlier, later in ((one, two), (two, three)):
        path = earlier.prompt_token_ids + earlier.response_token_ids
        assert later.prompt_token_ids[: len(path)] == path
    assert bench.gateway.stats()["serve/prefix_breaks"] == 0


async def test_nothing_to_say_loads_the_model(bench: Bench) -> None:
    base = bench.rollout().base_url
    for path, held in (("/api/chat", "message"), ("/api/generate", "response")):
        for more, reason in (({}, "load"), ({"keep_alive": 0}, "unload")):
            _, text = await _ask(bench, base, {"model": "policy"} | more, path)
            reply = json.loads(text)
            assert (reply["done"], reply["done_reason"]) == (True, reason) and held in reply
    assert bench.store.spans("r1") == []


async def test_errors_and_models_use_the_dialect_format(bench: Bench) -> None:
    base = bench.rollout().base_url
    response, text = await _ask(bench, base, BODY | {"options": {"top_p": 0}})
    assert response.status == 400 and isinstance(json.loads(text)["error"], str)
    _, text = await _ask(bench, base, BODY | {"options": {"num_predict": 0}})
    assert "num_predict" in json.loads(text)["error"]
    response, text = await _ask(bench, bench.gateway.url, BODY)
    assert response.status == 401 and set(json.loads(text)) == {"error"}
    _, text = await _ask(bench, base, {"model": "policy:latest"}, "/api/show")
    assert json.loads(text)["model_info"]["policy.context_length"] == 512
    for path, key in (("tags", "models"), ("ps", "models"), ("version", "version")):
        async with bench.http.get(f"{base.removesuffix('/v1')}/api/{path}") as response:
            assert (await response.json())[key]
