"""Tests that an answer's usage says how many tokens of the prompt were cached, in every dialect."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from gateway_bench import Bench

TEXT = "Say what is cached of this prompt."
MESSAGES = [{"role": "user", "content": TEXT}]
CHAT = {"model": "policy", "messages": MESSAGES, "max_tokens": 2}
Usage = Callable[[Any], tuple[int, int]]  # returns (all tokens of the prompt, cached ones)


def _openai(body: Any) -> tuple[int, int]:
    usage = body["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def _responses(body: Any) -> tuple[int, int]:
    usage = body.get("response", body)["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def _anthropic(body: Any) -> tuple[int, int]:
    usage = body["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


def _gemini(body: Any) -> tuple[int, int]:
    usage = body["usageMetadata"]
    return usage["promptTokenCount"], usage.get("cachedContentTokenCount", 0)


CONTENTS = {"contents": [{"role": "user", "parts": [{"text": TEXT}]}]}
FEW = {"generationConfig": {"maxOutputTokens": 2}}
CALLS: list[tuple[str, dict[str, Any], Usage]] = [
    ("/v1/chat/completions", CHAT, _openai),
    ("/v1/completions", {"model": "policy", "prompt": TEXT, "max_tokens": 2}, _openai),
    ("/v1/responses", {"model": "policy", "input": TEXT, "max_output_tokens": 2}, _responses),
    ("/v1/messages", CHAT, _anthropic),
    ("/v1beta/models/policy:generateContent", CONTENTS | FEW, _gemini),
]


@pytest.mark.parametrize(("path", "body", "usage"), CALLS, ids=[path for path, *_ in CALLS])
async def test_usage_counts_cached_tokens(
    bench: Bench, path: str, body: dict[str, Any], usage: Usage
) -> None:
    counts = []
    for _ in range(2):
        before = bench.gateway.stats()["serve/prefix_hit_tokens"]
        status, answer, _ = await bench.post(body, path=path)
        assert status == 200
        counts.append(usage(answer))
        assert bench.gateway.stats()["serve/prefix_hit_tokens"] - before == counts[-1][1]
    (number, first), (again, second) = counts
    assert (first, again, second) == (0, number, number - 1)  # the last token is always computed


@pytest.mark.parametrize(
    ("path", "body", "usage", "event"),
    [
        (*CALLS[0][:2], _openai, -2),  # before [DONE]
        (*CALLS[2][:2], _responses, -1),
        (*CALLS[3][:2], _anthropic, -2),
    ],
)
async def test_a_stream_ends_with_the_number_of_cached_tokens(
    bench: Bench, path: str, body: dict[str, Any], usage: Usage, event: int
) -> None:
    _, whole, _ = await bench.post(body, path=path)
    body = body | {"stream": True}
    if usage is _openai:
        body = body | {"stream_options": {"include_usage": True}}
    headers = {"Authorization": "Bearer right-key"}
    async with bench.http.post(bench.gateway.url + path, json=body, headers=headers) as response:
        lines = [line for line in (await response.text()).splitlines() if "data: " in line]
    number = usage(whole)[0]
    assert usage(json.loads(lines[event].removeprefix("data: "))) == (number, number - 1)


async def test_of_several_choices_the_one_with_fewest_counts(bench: Bench) -> None:
    _, first, _ = await bench.post(CHAT | {"n": 3})
    assert _openai(first)[1] == 0  # the first choice computed what the others took from the cache
    prompts = {"model": "policy", "prompt": [TEXT, TEXT + "!"], "n": 2, "max_tokens": 2}
    await bench.post(prompts, path="/v1/completions")
    _, again, _ = await bench.post(prompts, path="/v1/completions")
    number, cached = _openai(again)
    assert cached == number - 2
