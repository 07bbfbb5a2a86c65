"""Tests of OpenAI's completions: prompts in four forms, echo, the legacy log-probabilities."""

import json
import math
from typing import Any

import openai
import pytest
from coded import raises_coded
from gateway_bench import Bench, Connect
from openai.types import Completion

from lightning_jax.engine.types import Completion as Sampled
from lightning_jax.gateway.answer import AnswerBuilder
from lightning_jax.gateway.dialects.base import ReplyContext, Sender
from lightning_jax.gateway.dialects.openai_completions import parse
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.prompt.tool_calls import TextPiece
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.types import LLM

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "policy", "prompt": "once", "max_tokens": 6, "seed": 5}
SENDER = Sender({}, {}, {}, "tiny", SavedConversations())


async def _post(bench: Bench, base: str | None = None, **fields: Any) -> Any:
    status, reply, _ = await bench.post(BODY | fields, base=base, path=PATH)
    assert status == 200, reply
    return reply


def _extras(model: Any) -> set[str]:
    """Return the names of fields, at any depth, that the client's types do not have."""
    found = set(getattr(model, "model_extra", None) or {})
    values = vars(model).values() if hasattr(model, "model_extra") else model
    for value in values if isinstance(values, list) else list(values):
        if isinstance(value, list) or hasattr(value, "model_extra"):
            found |= _extras(value)
    return found


async def test_a_prompt_is_continued_and_recorded(bench: Bench) -> None:
    base = bench.rollout().base_url
    reply = await _post(bench, base, logprobs=2)
    parsed = Completion.model_validate(reply)
    assert _extras(parsed) == set() and parsed.id.startswith("cmpl-")
    (choice,) = parsed.choices
    (transition,), _ = spans_to_transitions(bench.store.spans("r1"))
    (span,) = bench.store.spans("r1")
    assert span.attributes["gen_ai.operation.name"] == "text_completion"
    tokenizer = bench.model.tokenizer
    assert transition.prompt_token_ids == tuple(tokenizer.encode("once"))
    assert choice.text == tokenizer.decode(transition.response_token_ids)
    assert choice.logprobs and choice.logprobs.token_logprobs == pytest.approx(
        transition.behavior_logprobs
    )
    assert choice.logprobs.text_offset and choice.logprobs.text_offset[0] == 0
    tokens, tops = choice.logprobs.tokens or [], choice.logprobs.top_logprobs or []
    assert all(token in top and len(top) <= 3 for token, top in zip(tokens, tops, strict=True))
    assert parsed.usage and parsed.usage.prompt_tokens == 4
    assert parsed.usage.completion_tokens == len(transition.response_token_ids)


async def test_tokens_may_be_named_by_their_ids(bench: Bench) -> None:
    fields = {"logprobs": 2, "echo": True, "return_token_ids": True, "prompt": "<|im_end|>é"}
    (plain,) = (await _post(bench, **fields))["choices"]
    (named,) = (await _post(bench, **fields, return_tokens_as_token_ids=True))["choices"]
    ids = named["prompt_token_ids"] + named["token_ids"]
    assert ids == plain["prompt_token_ids"] + plain["token_ids"]
    tokens, tops = named["logprobs"]["tokens"], named["logprobs"]["top_logprobs"]
    assert tokens == [f"token_id:{i}" for i in ids]
    for key in ("text_offset", "token_logprobs"):
        assert named["logprobs"][key] == plain["logprobs"][key]
    for token, best in zip(tokens, tops, strict=True):
        assert best is None or token in best
        assert all(name.removeprefix("token_id:").isdecimal() for name in best or ())


def test_stream_options_need_a_stream() -> None:
    fields = BODY | {"stream_options": {"include_usage": True}}
    with raises_coded(ApiError, "needs_stream", "stream_options"):
        parse(fields, SENDER)
    assert parse(fields | {"stream": True}, SENDER).request.stream


async def test_prompts_have_four_shapes(bench: Bench) -> None:
    ids = bench.model.tokenizer.encode("once")
    alone = (await _post(bench, return_token_ids=True))["choices"][0]
    assert alone["prompt_token_ids"] == ids
    for prompt in (ids, [ids], ["once"]):
        assert (await _post(bench, prompt=prompt))["choices"][0]["text"] == alone["text"]
    both = await _post(bench, prompt=["once", "upon"], n=2, return_token_ids=True)
    asked = [bench.model.tokenizer.decode(c["prompt_token_ids"]) for c in both["choices"]]
    assert asked == ["once", "once", "upon", "upon"]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == 8
    twice = await _post(bench, prompt=["once", "once"], n=2)
    assert twice["usage"]["prompt_tokens"] == 8
    lists = await _post(bench, prompt=[ids, ids[:2]], echo=True)
    assert [c["text"][:2] for c in lists["choices"]] == ["on", "on"]


async def test_default_is_16_tokens(bench: Bench) -> None:
    reply = await _post(bench, max_tokens=None, logit_bias={"258": -100})
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_ends_the_text(bench: Bench) -> None:
    text = (await _post(bench, temperature=0))["choices"][0]["text"]
    reply = await _post(bench, temperature=0, stop=[text[3]])
    assert reply["choices"][0]["text"] == text[: text.index(text[3])]
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("echo", [False, True])
async def test_a_stream_says_what_a_whole_answer_says(
    bench: Bench, connect: Connect, echo: bool
) -> None:
    client = connect(LLM(f"{bench.gateway.url}/v1", "right-key", "policy"))
    logprobs_asked = None if echo else 1
    fields: Any = {"prompt": ["once", [117, 112]], "echo": echo, "n": 2}
    fields |= {"logprobs": logprobs_asked}
    fields = BODY | fields
    whole = await client.completions.create(**fields)
    stream = await client.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    texts, logprobs = [""] * 4, [{} for _ in range(4)]
    finish: dict[int, str] = {}
    usage = None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for key, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                logprobs[choice.index][key] = logprobs[choice.index].get(key, []) + values
            if choice.finish_reason:
                finish[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert texts == [choice.text for choice in whole.choices]
    assert finish == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    for choice, streamed in zip(whole.choices, logprobs, strict=True):
        assert (choice.logprobs is None) == echo
        if choice.logprobs is None:
            continue
        entries = choice.logprobs.to_dict()
        for key in ("tokens", "text_offset"):
            assert streamed[key] == entries[key]
        assert _numbers(streamed) == pytest.approx(_numbers(entries), abs=1e-5, nan_ok=True)


def _numbers(entries: Any) -> list[float]:
    return [math.nan if value is None else value for value in entries["token_logprobs"]]


async def test_an_echo_begins_with_the_prompt(bench: Bench) -> None:
    prompt = "<|im_start|>é"
    reply = await _post(bench, prompt=prompt, echo=True, logprobs=0, max_tokens=2)
    choice = reply["choices"][0]
    assert choice["text"].startswith(prompt)
    entries = choice["logprobs"]
    assert entries["tokens"][0] == "<|im_start|>"
    # The two bytes of é are two tokens, and both begin where é does.
    assert entries["text_offset"][:4] == [0, 12, 12, 13]
    assert entries["token_logprobs"][0] is None is entries["top_logprobs"][0]
    assert all(value < 0 for value in entries["token_logprobs"][1:])
    assert all(len(top) == 1 for top in entries["top_logprobs"][1:])


async def test_an_echoed_prompt_is_scored_as_it_was_sampled(bench: Bench) -> None:
    fields = {"prompt": [5, 6, 7], "temperature": 0.0, "logprobs": 2, "return_token_ids": True}
    fields |= {"logit_bias": {"258": -100}}
    choice = (await _post(bench, **fields))["choices"][0]
    longer = [5, 6, 7, *choice["token_ids"]]
    again = await _post(bench, **(fields | {"prompt": longer, "echo": True, "max_tokens": 1}))
    entries = again["choices"][0]["logprobs"]
    sampled = choice["logprobs"]["token_logprobs"]
    assert entries["token_logprobs"][3 : 3 + len(sampled)] == pytest.approx(sampled, abs=1e-5)
    assert len(entries["tokens"]) == len(longer) + 1
    best = entries["top_logprobs"][3]
    assert best == pytest.approx(choice["logprobs"]["top_logprobs"][0], abs=1e-5)


def test_offsets_of_a_known_answer() -> None:
    tokenizer = tiny_tokenizer()
    ids = (*tokenizer.encode("aé"), 258)
    sampled = Sampled(ids, "aé", (-1.0,) * 4, (-1.0,) * 4, (1,) * 4, "stop")
    builder = AnswerBuilder(0)
    builder.add([TextPiece("aé")], None)
    body = BODY | {"prompt": "x", "logprobs": 0}
    reply = parse(body, SENDER).begin(
        ReplyContext("t", 1, ((tokenizer.encode("x")[0],),), tokenizer)
    )
    (choice,) = reply.body([builder.answer((1,), sampled)])["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
    assert choice["logprobs"]["tokens"][3] == "<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"prompt": None}, "prompt", "wrong_type"),
        ({"prompt": []}, "prompt", "wrong_type"),
        ({"prompt": [[]]}, "prompt", "wrong_type"),
        ({"prompt": ["a", 1]}, "prompt", "wrong_type"),
        ({"prompt": [1.5]}, "prompt", "wrong_type"),
        ({"prompt": [True]}, "prompt", "wrong_type"),
        ({"prompt": [-1]}, "prompt", "wrong_type"),
        ({"prompt": [2**70]}, "prompt", "wrong_type"),
        ({"suffix": "end"}, "suffix", "unsupported"),
        ({"best_of": 2}, "best_of", "unsupported"),
        ({"logprobs": 21}, "logprobs", "out_of_range"),
        ({"logprobs": True}, "logprobs", "wrong_type"),
        ({"n": 0}, "n", "out_of_range"),
        ({"echo": "yes"}, "echo", "wrong_type"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "conflict"),
        ({"model": "gpt"}, "model", "model_not_found"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(BODY | fields, SENDER)
    assert (caught.value.param, caught.value.reason) == (param, reason)
    assert param in caught.value.message
    assert parse(BODY | {"n": 2, "best_of": 2, "suffix": None}, SENDER).request.num_choices == 2


@pytest.mark.parametrize(
    ("prompt", "code", "param", "number"),
    [
        ([1, 259], "invalid_value", None, "258"),
        ("", "invalid_value", "prompt", ""),
        ("x" * 600, "context_length_exceeded", "prompt", "600"),
        (["x"] * 65, "invalid_value", "prompt", "65"),
    ],
)
async def test_what_the_engine_cannot_take_is_refused(
    bench: Bench, prompt: Any, code: str, param: str | None, number: str
) -> None:
    base = bench.rollout().base_url
    status, reply, _ = await bench.post(BODY | {"prompt": prompt}, base=base, path=PATH)
    assert (status, reply["error"]["code"], reply["error"]["param"]) == (400, code, param)
    assert number in reply["error"]["message"]
    assert bench.gateway.close_rollout("r1").unanswered == ()
    json.dumps(reply)


async def test_a_broken_stream_ends_in_an_error(bench: Bench, connect: Connect) -> None:
    client = connect(bench.rollout())
    fields: Any = BODY | {"max_tokens": 480, "logit_bias": {"258": -100}}
    with pytest.raises(openai.APIError) as caught:
        async for _ in await client.completions.create(**fields, stream=True):
            bench.loop.close()
    assert caught.value.code == "engine_error"
