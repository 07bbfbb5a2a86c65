"""Tests that fields which bind an answer are kept or refused in every dialect."""

from typing import Any

import pytest
from gateway_bench import Bench

from lightning_jax.gateway.dialects.unknown_fields import BINDING, check_unknown
from lightning_jax.gateway.errors import ApiError

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 1}},
    "/v1beta/models/policy:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
}
ASKED: dict[str, Any] = {
    "guided_choice": ["red"],
    "guided_json": {"type": "object"},
    "structured_outputs": {"choice": ["red"]},
    "grammar": 'root ::= "red"',
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "min_tokens": 30,
    "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "prompt_logprobs": 0,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "thinking_token_budget": 0,
    "repetition_penalty": 1.5,
    "skip_special_tokens": False,
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_that_binds_the_answer_is_refused_by_name(bench: Bench, path: str) -> None:
    for name, value in ASKED.items():
        body = {"model": "policy", **BODIES[path], name: value}
        status, reply, _ = await bench.post(body, path=path)
        assert status == 400 and name in str(reply["error"])


@pytest.mark.parametrize("where", ["options", "generationConfig"])
async def test_inner_objects_are_checked_too(bench: Bench, where: str) -> None:
    path = "/api/chat" if where == "options" else "/v1beta/models/policy:generateContent"
    name = "min_tokens" if where == "options" else "minTokens"
    body = {"model": "policy", **BODIES[path], where: {name: 3}}
    status, reply, _ = await bench.post(body, path=path)
    assert status == 400 and name in str(reply["error"])


async def test_fields_of_another_dialect_are_refused(bench: Bench) -> None:
    for path, name, value in (
        ("/v1/responses", "stop", ["x"]),
        ("/v1/responses", "response_format", {"type": "json_object"}),
        ("/v1/completions", "response_format", {"type": "json_object"}),
        ("/v1/completions", "tool_choice", "required"),
        ("/v1/messages", "stop", "x"),
        ("/v1/messages", "logit_bias", {"1": 5}),
        ("/v1/chat/completions", "max_output_tokens", 5),
        ("/api/chat", "tool_choice", "required"),
    ):
        body = {"model": "policy", **BODIES[path], name: value}
        status, reply, _ = await bench.post(body, path=path)
        assert status == 400 and name in str(reply["error"])


@pytest.mark.parametrize("name", BINDING)
def test_values_that_ask_for_nothing_pass(name: str) -> None:
    for value in (None, *BINDING[name]):
        check_unknown("test", {name: value, "other": 1})
    if name != "skip_special_tokens":
        for value in (False, "", [], {}):
            check_unknown("test", {name: value})
    with pytest.raises(ApiError) as raised:
        check_unknown("test", {name: [7]})
    assert (raised.value.code, raised.value.key) == ("unsupported_parameter", name)
    check_unknown("test", {name: [7]}, ignored={name})
