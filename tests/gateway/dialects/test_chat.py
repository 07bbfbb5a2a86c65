"""Tests of chat bodies: requests, overriding settings, and errors that name invalid fields."""

import logging
from typing import Any

import pytest
from gateway_bench import MakeBench

from lightning_jax.gateway.conversations import SavedConversations
from lightning_jax.gateway.dialects.base import Sender
from lightning_jax.gateway.dialects.chat import parse
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import as_object
from lightning_jax.gateway.guarantee import may_call
from lightning_jax.gateway.request import Function, PolicyRequest, ToolChoice
from lightning_jax.gateway.rollouts import OpenRollout, RolloutSettings, derive_seed
from lightning_jax.gateway.sampling import sampling_params
from lightning_jax.types import SamplingParams

BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def _parse(headers: dict[str, str] | None = None, **fields: Any) -> PolicyRequest:
    return parse(BODY | fields, Sender(headers or {}, {}, {}, "tiny", SavedConversations()))[0]


def _sampling(request: PolicyRequest, rollout: OpenRollout | None, room: int) -> Any:
    return sampling_params(request, rollout, (room,), None, max_logit_biases=9, max_stop_chars=99)


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
    with pytest.raises(ApiError, match=r"expected 'policy', 'policy:AGENT' or 'tiny'") as caught:
        _parse(model=model)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("messages", "hi", "messages is missing or no list"),
        ("messages", None, "messages is missing or no list"),
        ("model", 5, "model is 5; expected a model name"),
        ("temperature", "hot", "temperature is 'hot'; expected a number"),
        ("temperature", True, "temperature is True; expected a number"),
        ("temperature", 11, "temperature is 11.0; expected between 0 and 10"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", 10**400, "temperature is 2147483647.0"),
        ("top_p", 0, "top_p is 0.0; expected above 0 and at most 1"),
        ("min_p", 1, "min_p is 1.0; expected at least 0 and below 1"),
        ("top_k", 1.5, "top_k is 1.5; expected an integer"),
        ("max_tokens", 0, "max_tokens is 0; expected at least 1"),
        ("max_tokens", True, "max_tokens is True; expected an integer"),
        ("n", 0, "n is 0; expected 1 to 64"),
        ("n", 65, "n is 65; expected 1 to 64"),
        ("stop", 5, "stop is 5; expected a string or a list"),
        ("stop", [""], "expected at most 16 non-empty strings"),
        ("stop", ["a"] * 17, "expected at most 16 non-empty strings"),
        ("seed", "x", "seed is 'x'; expected an integer"),
        ("stream", "yes", "stream is 'yes'; expected true or false"),
        ("stream_options", True, "stream_options is True; expected an object"),
        ("metadata", [], "metadata is []; expected an object"),
        ("tools", {}, "tools is {}; expected a list of objects"),
        ("tools", [1], "tools is [1]; expected a list of objects"),
        ("tools", [{}], "tools[0] is {}; expected an object of type function"),
        ("tools", [{"function": {"name": 5}}], "tools[0].function.name is 5"),
        ("tools", [RUN, RUN], "tools names 'run' twice"),
        ("tools", [RUN] * 257, "tools has 257 entries; expected at most 256"),
        ("messages", [{}] * 4097, "messages has 4097 entries; expected at most 4096"),
        ("top_logprobs", 5, "top_logprobs is 5 without logprobs"),
        ("top_logprobs", 21, "top_logprobs is 21; expected 0 to 20"),
        ("logit_bias", {"a": 1}, "logit_bias has the key 'a'; expected a token id"),
        ("logit_bias", {"5": 101}, "between -100 and 100"),
        ("response_format", {"type": "xml"}, "response_format.type is 'xml'"),
        ("response_format", {"type": "json_schema"}, "response_format has no schema"),
        (
            "tool_choice",
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
            "expected auto, none, required or a function",
        ),
        ("tool_choice", "sometimes", "tool_choice is 'sometimes'; expected auto, none, required"),
        ("presence_penalty", 3, "presence_penalty is 3.0; expected between -2 and 2"),
        ("audio", {}, "audio is {}, which this server cannot do"),
    ],
)
def test_the_wrong_field_is_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        _sampling(_parse(**{field: value}), None, room=40)
    error = caught.value
    assert words in error.message
    assert (error.status, error.param) == (400, field)
    assert error.body["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(ApiError, match="the body is list; expected a JSON object"):
        as_object([])


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
    assert "'future_field'" in record.getMessage()


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
    with pytest.raises(ApiError, match="tool_choice names 'fly', which is not in tools"):
        _parse(tools=[RUN], tool_choice={"type": "function", "function": {"name": "fly"}})
    with pytest.raises(ApiError, match="asks for a call, but tools is empty"):
        _parse(tool_choice="required")


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
