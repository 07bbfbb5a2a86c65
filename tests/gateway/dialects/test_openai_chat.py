"""Tests of chat bodies: requests, overriding settings, and errors that name invalid fields."""

import logging
import re
from typing import Any

import pytest
from gateway_bench import Bench, MakeBench
from templates import QWEN3_HYBRID, tokenizer_with

from lightning_jax.engine.types import SamplingParams
from lightning_jax.gateway.calls.sampling import sampling_params
from lightning_jax.gateway.dialects.base import Sender
from lightning_jax.gateway.dialects.openai_chat import parse
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import as_object
from lightning_jax.gateway.prompt.grammar import may_call
from lightning_jax.gateway.request import Function, PolicyRequest, ToolChoice
from lightning_jax.gateway.sessions.open_rollouts import OpenRollout, RolloutSettings, derive_seed
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces import attributes

BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def _parse(headers: dict[str, str] | None = None, **fields: Any) -> PolicyRequest:
    return parse(BODY | fields, Sender(headers or {}, {}, {}, "tiny", SavedConversations())).request


def _sampling(request: PolicyRequest, rollout: OpenRollout | None, room: int) -> Any:
    rooms = (room,) * request.num_choices
    return sampling_params(request, rollout, rooms, None, max_logit_biases=9, max_stop_chars=99)


def test_a_bare_request_gets_openais_defaults() -> None:
    chat = _parse()
    assert (chat.num_choices, chat.max_tokens, chat.stream, chat.agent) == (1, None, False, "")
    assert _sampling(chat, None, room=40)[0].seed is not None
    (sampling,) = _sampling(_parse(seed=5), None, room=40)
    assert sampling == SamplingParams(max_tokens=40, seed=5)


def test_every_sampling_field_arrives() -> None:
    chat = _parse(
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "n": 2},
        **{"max_tokens": 9, "max_completion_tokens": 8, "stop": "END"},
    )
    first, second = _sampling(chat, None, room=40)
    assert first == SamplingParams(8, 0.5, 0.9, 7, 0.1, seed=2**31 - 3, stop=("END",))
    assert second.seed == derive_seed(2**31 - 3, 1)
    assert _parse(stop=["a", "b"]).stop == ("a", "b")
    assert _parse(top_k=-1).top_k == 0 and _parse(temperature=None).temperature == 1.0
    assert _parse(max_tokens=9, max_completion_tokens=None).max_tokens == 9


def test_a_rollouts_settings_override_the_agent() -> None:
    settings = RolloutSettings("r", 7, temperature=1.0, top_p=1.0, top_k=0, max_tokens=20)
    rollout = OpenRollout(settings)
    chat = _parse(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, max_tokens=30, seed=1)
    (first,) = _sampling(chat, rollout, room=100)
    assert first == SamplingParams(max_tokens=20, seed=derive_seed(7, 0))
    (second,) = _sampling(chat, rollout, room=100)
    assert second.seed == derive_seed(7, 1) != first.seed
    agent_decides = OpenRollout(RolloutSettings("r", 7))
    (third,) = _sampling(chat, agent_decides, room=5)
    assert (third.temperature, third.top_p, third.top_k, third.max_tokens) == (0.0, 0.5, 3, 5)
    assert (first.min_p, third.min_p) == (0.0, 0.1)
    assert third.seed == first.seed
    greedy = OpenRollout(RolloutSettings("r", 7, temperature=0.0))
    assert _sampling(_parse(), greedy, room=5)[0].temperature == 0.0


def test_seeds_differ_in_every_part_and_repeat() -> None:
    seeds = [derive_seed(a, b) for a in range(30) for b in range(30)]
    assert len(set(seeds)) == 900 and all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(0, 0) == 867600841  # the same in every process and release


def test_the_agents_name_has_three_places() -> None:
    header = {"x-agent-name": "from-header"}
    assert _parse(header, metadata={"agent": "m"}, model="policy:p").agent == "from-header"
    assert _parse(metadata={"agent": "m"}, model="policy:p").agent == "m"
    assert _parse(model="policy:p").agent == "p" and _parse(model="policy:p").model == "policy:p"
    assert _parse(model="tiny").agent == ""


@pytest.mark.parametrize("model", ["gpt-4", "policy:", "", "policyx", "tiny:a"])
def test_an_unknown_model_is_not_found(model: str) -> None:
    with pytest.raises(ApiError) as caught:
        _parse(model=model)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert all(name in caught.value.message for name in ("'policy'", "'policy:AGENT'", "'tiny'"))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("messages", "hi", "wrong_type"),
        ("messages", None, "wrong_type"),
        ("model", 5, "wrong_type"),
        ("temperature", "hot", "wrong_type"),
        ("temperature", True, "wrong_type"),
        ("temperature", 11, "out_of_range"),
        ("temperature", float("nan"), "out_of_range"),
        ("temperature", 10**400, "out_of_range"),
        ("top_p", 0, "out_of_range"),
        ("min_p", 1, "out_of_range"),
        ("top_k", 1.5, "wrong_type"),
        ("max_tokens", 0, "out_of_range"),
        ("max_tokens", True, "wrong_type"),
        ("n", 0, "out_of_range"),
        ("n", 65, "out_of_range"),
        ("stop", 5, "wrong_type"),
        ("stop", [""], "out_of_range"),
        ("stop", ["a"] * 17, "out_of_range"),
        ("seed", "x", "wrong_type"),
        ("stream", "yes", "wrong_type"),
        ("stream_options", True, "wrong_type"),
        ("stream_options", {"include_usage": True}, "needs_stream"),
        ("chat_template_kwargs", [], "wrong_type"),
        ("chat_template_kwargs", {"messages": []}, "reserved"),
        ("chat_template_kwargs", {"x": 10**60}, "out_of_range"),
        ("chat_template_kwargs", {"x": "y" * 2**16}, "too_long"),
        ("chat_template", "{{ 1 }}", "unsupported"),
        ("add_generation_prompt", False, "unsupported"),
        ("metadata", [], "wrong_type"),
        ("tools", {}, "wrong_type"),
        ("tools[0]", [1], "wrong_type"),
        ("tools[0].function", [{}], "missing"),
        ("tools[0].function.name", [{"function": {"name": 5}}], "wrong_type"),
        ("tools", [RUN, RUN], "duplicate"),
        ("tools", [RUN] * 257, "too_many"),
        ("messages", [{}] * 4097, "too_many"),
        ("top_logprobs", 5, "needs_logprobs"),
        ("top_logprobs", 21, "out_of_range"),
        ("logit_bias", {"a": 1}, "unknown"),
        ("logit_bias", {"5": 101}, "out_of_range"),
        ("response_format.type", {"type": "xml"}, "unknown"),
        ("response_format.schema", {"type": "json_schema"}, "missing"),
        (
            "tool_choice",
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
            "unknown",
        ),
        ("tool_choice", "sometimes", "unknown"),
        ("presence_penalty", 3, "out_of_range"),
        ("audio", {}, "unsupported"),
    ],
)
def test_the_wrong_field_is_named(key: str, value: Any, reason: str) -> None:
    field = re.split(r"[.\[]", key)[0]
    with pytest.raises(ApiError) as caught:
        _sampling(_parse(**{field: value}), None, room=40)
    error = caught.value
    assert (error.key, error.reason) == (key, reason)
    assert (error.status, error.param) == (400, field) and field in error.message
    assert error.body["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        as_object([])
    assert (caught.value.status, caught.value.reason) == (400, "wrong_type")


def test_what_asks_for_nothing_is_let_through(caplog: pytest.LogCaptureFixture) -> None:
    chat = _parse(
        **{"frequency_penalty": 0.0, "response_format": {"type": "text"}, "top_logprobs": 0},
        **{"logit_bias": None, "user": "u", "tool_choice": "none", "tools": [RUN]},
    )
    assert chat.tool_choice == ToolChoice("none") and not may_call(chat)
    assert chat.functions  # the prompt shows them, like the previous one
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        _parse(future_field=1)
        _parse(future_field=2)
    (record,) = caplog.records
    assert (vars(record)["event"], vars(record)["fields"]) == ("unknown_fields", ["future_field"])


def test_tools_and_what_must_be_called() -> None:
    chat = _parse(tools=[RUN], parallel_tool_calls=False)
    assert chat.functions == (Function("run", "", {"type": "object"}),)
    assert chat.functions[0].as_tool()["function"]["name"] == "run"
    assert (chat.tool_choice, chat.parallel_tool_calls) == (ToolChoice(), False)
    named = {"type": "function", "function": {"name": "run"}}
    assert _parse(tools=[RUN], tool_choice=named).tool_choice == ToolChoice("required", ("run",))
    allowed = {"mode": "required", "tools": [named]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert _parse(tools=[RUN], tool_choice=choice).tool_choice == ToolChoice("required", ("run",))
    with pytest.raises(ApiError) as caught:
        _parse(tools=[RUN], tool_choice={"type": "function", "function": {"name": "fly"}})
    assert (caught.value.param, caught.value.reason) == ("tool_choice", "unknown_tool")
    with pytest.raises(ApiError) as caught:
        _parse(tool_choice="required")
    assert (caught.value.param, caught.value.reason) == ("tools", "empty")


def test_an_output_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert _parse(response_format=wrapped).output_schema == schema
    assert _parse(response_format={"type": "json_object"}).output_schema == {}
    assert _parse(response_format={"type": "text"}).output_schema is None


def test_penalties_bias_and_alternatives_arrive() -> None:
    fields = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"7": -100}}
    (sampling,) = _sampling(_parse(logprobs=True, top_logprobs=3, **fields), None, room=9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.0)
    assert (sampling.logit_bias, sampling.top_logprobs) == (((7, -100.0),), 3)


def test_variables_for_the_chat_template_arrive() -> None:
    assert _parse(chat_template_kwargs={"a": 1}).chat_template_kwargs == {"a": 1}
    off = {"enable_thinking": False}
    assert _parse(reasoning_effort="none").chat_template_kwargs == off
    assert _parse(reasoning_effort="low").chat_template_kwargs == {}
    on = {"enable_thinking": True}
    both = _parse(reasoning_effort="none", chat_template_kwargs=on)
    assert both.chat_template_kwargs == on


async def test_variables_change_the_prompt_and_are_recorded(make_bench: MakeBench) -> None:
    async with make_bench(tokenizer=tokenizer_with(QWEN3_HYBRID)) as bench:
        base = bench.rollout().base_url
        for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
            status, _, _ = await bench.post(BODY | {"max_tokens": 1} | fields, base=base)
            assert status == 200
        plain, silent = bench.store.spans("r1")
        prompts = [span.attributes[attributes.PROMPT_TOKEN_IDS] for span in (plain, silent)]
        texts = [tiny_tokenizer().decode(ids, skip_special=False) for ids in prompts]
        assert texts[1] == texts[0] + "<think>\n\n</think>\n\n"
        assert attributes.CHAT_TEMPLATE_KWARGS not in plain.attributes
        assert silent.attributes[attributes.CHAT_TEMPLATE_KWARGS] == '{"enable_thinking": false}'


async def test_variables_that_the_template_cannot_take_are_refused(make_bench: MakeBench) -> None:
    template = "{{ messages[0].content }}{{ 'x' * n if n else '' }}"
    async with make_bench(tokenizer=tokenizer_with(template)) as bench:
        assert (await bench.post(BODY | {"max_tokens": 1}))[0] == 200
        for value in (10**9, {"a": 1}, "x"):
            status, reply, _ = await bench.post(BODY | {"chat_template_kwargs": {"n": value}})
            assert (status, reply["error"]["code"]) == (400, "invalid_value")


async def test_tokens_may_be_named_by_their_ids(bench: Bench) -> None:
    fields = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    status, reply, _ = await bench.post(BODY | fields | {"return_tokens_as_token_ids": True})
    assert status == 200
    (choice,) = reply["choices"]
    entries, ids = choice["logprobs"]["content"], choice["token_ids"]
    assert ids and [entry["token"] for entry in entries] == [f"token_id:{i}" for i in ids]
    tops = [top["token"].removeprefix("token_id:") for e in entries for top in e["top_logprobs"]]
    assert len(tops) == 2 * len(ids) and all(map(str.isdecimal, tops))


async def test_too_many_logit_biases_are_refused(make_bench: MakeBench) -> None:
    async with make_bench(max_logit_biases=2) as bench:
        for number, status in ((2, 200), (3, 400)):
            bias = {str(token_id): 1 for token_id in range(number)}
            found, reply, _ = await bench.post(BODY | {"logit_bias": bias, "max_tokens": 1})
            assert found == status
        assert reply["error"]["param"] == "logit_bias"
        assert "serve.max_logit_biases" in reply["error"]["message"]


async def test_long_stop_strings_are_refused(make_bench: MakeBench) -> None:
    async with make_bench(max_stop_chars=6) as bench:
        for stop, status in ((["abc", "def"], 200), ("abcdefg", 400)):
            found, reply, _ = await bench.post(BODY | {"stop": stop, "max_tokens": 1})
            assert found == status
        assert reply["error"]["param"] == "stop"
