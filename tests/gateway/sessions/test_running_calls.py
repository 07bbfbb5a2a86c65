"""Tests that a retry joins its first try, with one sample and one span, and others do not."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from gateway_bench import Bench

from lightning_jax.gateway.calls import responder
from lightning_jax.gateway.calls.offload import INLINE_BYTES
from lightning_jax.gateway.sessions import running_calls

BODY: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 200,
    "temperature": 1.0,
}
LONG: dict[str, Any] = BODY | {"max_tokens": 480, "logit_bias": {"258": -100}}  # never ends early


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def _text(reply: Any) -> str:
    return reply["choices"][0]["message"]["content"]


async def test_a_retry_joins_the_call_that_runs(bench: Bench) -> None:
    base = bench.rollout().base_url
    first = asyncio.create_task(bench.post(BODY, base=base))
    await _until(lambda: bench.loop.stats()["serve/running"] == 1)
    again = await bench.post(BODY, base=base, **{"x-stainless-retry-count": "1"})
    assert _text(again[1]) == _text((await first)[1]) and again[1]["id"] == (await first)[1]["id"]
    streamed = BODY | {"stream": True}
    assert len(bench.store.spans("r1")) == 1
    other = await bench.post(streamed | {"stream": False}, base=base)
    assert _text(other[1]) != _text(again[1])  # not a retry, so a separate call
    assert bench.gateway.stats()["serve/joined_calls"] == 1


async def test_a_retry_joins_the_call_that_is_being_rendered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, go_on, render = list[str](), threading.Event(), responder.render_prompt

    def slow(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        assert go_on.wait(20)
        return render(*arguments)

    monkeypatch.setattr(responder, "render_prompt", slow)
    base, large = bench.rollout().base_url, BODY | {"metadata": {"note": "x" * INLINE_BYTES}}
    first = asyncio.create_task(bench.post(large, base=base))
    await _until(lambda: len(threads) == 1)
    again = asyncio.create_task(bench.post(large, base=base, **{"x-stainless-retry-count": "1"}))
    await _until(lambda: bench.gateway.stats()["serve/joined_calls"] == 1)
    go_on.set()
    assert (await again)[1]["id"] == (await first)[1]["id"]
    assert len(threads) == len(bench.store.spans("r1")) == 1


async def test_a_retry_gets_the_answer_that_came_too_late(bench: Bench) -> None:
    base = bench.rollout().base_url
    _, reply, _ = await bench.post(BODY, base=base)
    _, again, _ = await bench.post(BODY, base=base, **{"x-stainless-retry-count": "1"})
    assert again == reply and len(bench.store.spans("r1")) == 1


async def test_equal_requests_are_two_calls(bench: Bench) -> None:
    base = bench.rollout().base_url
    replies = await asyncio.gather(*(bench.post(BODY, base=base) for _ in range(2)))
    assert _text(replies[0][1]) != _text(replies[1][1])
    assert len(bench.store.spans("r1")) == 2


async def test_a_key_makes_requests_the_same(bench: Bench) -> None:
    base = bench.rollout().base_url
    replies = [await bench.post(BODY, base=base, **{"Idempotency-Key": "k"}) for _ in range(2)]
    assert _text(replies[0][1]) == _text(replies[1][1])
    assert len(bench.store.spans("r1")) == 1


async def test_other_rollouts_are_never_joined(bench: Bench) -> None:
    bases = [bench.rollout(name, seed).base_url for name, seed in (("a", 1), ("b", 2))]
    retry = {"x-stainless-retry-count": "1"}
    replies = [await bench.post(BODY, base=base, **retry) for base in bases]
    assert _text(replies[0][1]) != _text(replies[1][1])


async def test_openais_client_times_out_and_asks_again(bench: Bench) -> None:
    llm = bench.rollout()
    async with openai.AsyncOpenAI(
        base_url=llm.base_url, api_key=llm.api_key, max_retries=5, timeout=0.1
    ) as client:
        reply = await client.chat.completions.create(**LONG)
    assert bench.gateway.stats()["serve/joined_calls"] >= 1
    assert len(bench.store.spans("r1")) == 1
    (span,) = bench.store.spans("r1")
    assert span.error is None
    tokens = span.attributes["lightning.response_token_ids"]
    assert bench.model.tokenizer.decode(tokens) == reply.choices[0].message.content


async def test_a_stream_that_was_read_is_not_asked_for_again(bench: Bench) -> None:
    llm = bench.rollout()
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        stream = await client.chat.completions.create(
            **LONG, stream=True, extra_headers={"x-stainless-read-timeout": "0.001"}
        )
        await anext(aiter(stream))
        await stream.close()
    await _until(lambda: bool(bench.store.spans("r1")))
    assert bench.store.spans("r1")[0].error is not None


async def test_nobody_asks_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_calls, "RETRY_GRACE_S", 0.01)
    llm = bench.rollout()
    async with openai.AsyncOpenAI(
        base_url=llm.base_url, api_key=llm.api_key, max_retries=0, timeout=0.1
    ) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**LONG)
    await _until(lambda: bench.loop.stats()["serve/running"] == 0)
    await _until(lambda: bool(bench.store.spans("r1")))
    assert bench.store.spans("r1")[0].error is not None
