"""Tests of calls at their time limit: how they end, what is recorded, and what is not charged."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from gateway_bench import Bench, Connect
from slow_engine import SlowEngine

from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.sessions import open_rollouts
from lightning_jax.traces import attributes
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.traces.store import Store

CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
GEMINI: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "?"}]}]}
LONG = 1500  # tokens
PATHS: dict[str, tuple[dict[str, Any], str]] = {  # path -> (body, end of a late answer)
    "/v1/chat/completions": (CHAT | {"max_tokens": LONG}, '"finish_reason":"length"'),
    "/v1/completions": ({"prompt": "?", "max_tokens": LONG}, '"finish_reason":"length"'),
    "/v1/responses": ({"input": "?"}, '"incomplete_details":{"reason":"max_output_tokens"}'),
    "/v1/messages": (CHAT | {"max_tokens": LONG}, '"stop_reason":"max_tokens"'),
    "/api/chat": (CHAT | {"options": {"num_predict": LONG}}, '"done_reason":"length"'),
    "/api/generate": ({"prompt": "?", "options": {"num_predict": -1}}, '"done_reason":"length"'),
    "/v1beta/models/policy:generateContent": (GEMINI, '"finishReason":"MAX_TOKENS"'),
    "/v1beta/models/policy:streamGenerateContent": (GEMINI, '"finishReason":"MAX_TOKENS"'),
}


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a gateway over a `SlowEngine`, which is `slow.loop`."""
    engine: Any = SlowEngine()
    store = Store(tmp_path / "store.sqlite")
    model: Any = None
    async with Gateway(engine, store) as gateway, aiohttp.ClientSession() as http:
        yield Bench(gateway, engine, store, model, http)
    store.close()


def _chat(max_tokens: int = LONG, **fields: Any) -> dict[str, Any]:
    return CHAT | {"max_tokens": max_tokens} | fields


async def _until_decoding(engine: Any, number: int = 1) -> None:
    async with asyncio.timeout(10):
        while len(engine.requests) < number:
            await asyncio.sleep(0.01)
    await asyncio.sleep(3 * engine.step_s)


@pytest.mark.parametrize("stream", [False, True])
async def test_late_response_ends_as_length_in_every_dialect(slow: Bench, stream: bool) -> None:
    engine: Any = slow.loop
    engine.slots = asyncio.Semaphore(len(PATHS))

    async def ask(index: int, path: str) -> tuple[int, str]:
        llm = slow.rollout(f"r{index}", call_timeout_s=0.6)
        url, headers = llm.base_url.removesuffix("/v1") + path, {"x-api-key": llm.api_key}
        body = PATHS[path][0] | ({} if "v1beta" in path else {"model": "policy", "stream": stream})
        async with slow.http.post(url, json=body, headers=headers) as reply:
            return reply.status, (await reply.text()).replace(" ", "")

    answers = await asyncio.gather(*(ask(index, path) for index, path in enumerate(PATHS)))
    for index, ((status, text), (_, end)) in enumerate(zip(answers, PATHS.values(), strict=True)):
        assert status == 200 and end in text, text[-500:]
        assert slow.gateway.close_rollout(f"r{index}").unanswered == ()
        (span,) = slow.store.spans(f"r{index}")
        assert span.attributes[attributes.LATE] is True
        (call,), reasons = spans_to_transitions([span])
        assert call.finish_reason == "length" and reasons == {}
        number = len(call.response_token_ids)
        assert 2 <= number < 100
        assert call.behavior_logprobs == (-1.0,) * number
        assert call.sampling_logprobs == (-2.0,) * number
    assert len(engine.requests) == len(PATHS)
    assert slow.gateway.stats()["serve/late_responses"] == len(PATHS)


async def test_retry_of_a_late_call_is_no_new_draw(slow: Bench, connect: Connect) -> None:
    engine: Any = slow.loop
    llm = slow.rollout(call_timeout_s=0.4)
    client = connect(llm).with_options(max_retries=3)
    reply = await client.chat.completions.create(**_chat())
    assert reply.choices[0].finish_reason == "length" and len(engine.requests) == 1
    # A client that lost the answer sends the call again.
    first = asyncio.create_task(slow.post(_chat(n=2), base=llm.base_url))
    await _until_decoding(engine, 3)
    retry = await slow.post(_chat(n=2), base=llm.base_url, **{"x-stainless-retry-count": "1"})
    assert retry[1]["id"] == (await first)[1]["id"]
    assert retry[1]["choices"] == (await first)[1]["choices"]
    assert len(engine.requests) == 3
    assert len(spans_to_transitions(slow.store.spans("r1"))[0]) == 3


async def test_time_in_the_queue_is_not_the_calls(slow: Bench) -> None:
    engine: Any = slow.loop
    engine.slots, engine.step_s = asyncio.Semaphore(1), 0.1
    others = asyncio.create_task(slow.post(_chat(8), base=slow.rollout("r0").base_url))
    await _until_decoding(engine)
    base = slow.rollout(call_timeout_s=1.0).base_url
    status, reply, _ = await slow.post(_chat(7), base=base)  # longer than 1 s in all
    assert (await others)[0] == status == 200
    assert reply["usage"]["completion_tokens"] == 7
    (span,) = slow.store.spans("r1")
    assert attributes.LATE not in span.attributes
    assert 0.3 < slow.gateway.lost("r1").total_s < 0.95


@pytest.mark.parametrize("stream", [False, True])
async def test_call_that_only_waits_is_infrastructure(
    slow: Bench, connect: Connect, stream: bool
) -> None:
    engine: Any = slow.loop
    engine.stands_still.set()
    client = connect(slow.rollout(call_timeout_s=0.2)).with_options(max_retries=3)
    with pytest.raises(openai.APIError) as caught:
        answer: Any = await client.chat.completions.create(**_chat(), stream=stream)
        async for _ in answer:
            pass
    assert caught.value.code == "call_timeout"
    assert "0.2" in str(caught.value) and "rollout.call_timeout_s" in str(caught.value)
    traffic = slow.gateway.close_rollout("r1")
    assert traffic.unanswered == ("call_timeout",) and traffic.lost.latest_s > 0.15
    assert spans_to_transitions(slow.store.spans("r1")) == ((), {"call_timeout": 1})
    engine.stands_still.clear()
    async with asyncio.timeout(10):
        await slow.post(_chat(2), base=slow.rollout("r2").base_url)  # its slot is free


async def test_engine_that_stands_still_midway_is_infrastructure(slow: Bench) -> None:
    engine: Any = slow.loop
    call = slow.post(_chat(), base=slow.rollout(call_timeout_s=0.3).base_url)
    running = asyncio.create_task(call)
    await _until_decoding(engine)
    engine.stands_still.set()
    status, reply, _ = await running
    assert (status, reply["error"]["code"]) == (504, "call_timeout")
    assert slow.gateway.close_rollout("r1").unanswered == ("call_timeout",)


async def test_pause_is_not_the_calls(slow: Bench) -> None:
    engine: Any = slow.loop
    base = slow.rollout(call_timeout_s=0.8).base_url
    running = asyncio.create_task(slow.post(_chat(60), base=base))  # 1.2 s
    await _until_decoding(engine)
    with slow.gateway.pauses.paused():
        await asyncio.sleep(1.5)
    assert (await running)[1]["usage"]["completion_tokens"] == 60


async def test_deadline_ends_calls_that_decode_and_refuses_later_ones(slow: Bench) -> None:
    engine: Any = slow.loop
    engine.slots = asyncio.Semaphore(2)
    base = slow.rollout().base_url
    late = [asyncio.create_task(slow.post(_chat(), base=base)) for _ in range(2)]
    await _until_decoding(engine, 2)
    waiting = asyncio.create_task(slow.post(_chat(top_p=0.5), base=base))
    await _until_decoding(engine, 3)
    async with asyncio.timeout(5):
        await slow.gateway.expire_rollout("r1")
    calls, _ = spans_to_transitions(slow.store.spans("r1"))
    assert [call.finish_reason for call in calls] == ["length"] * 2
    for call in late:
        assert (await call)[0] == 200
    status, reply, _ = await slow.post(_chat(), base=base)
    assert (status, reply["error"]["code"]) == (404, "rollout_not_found")
    traffic = slow.gateway.close_rollout("r1")
    assert (traffic.unanswered, traffic.num_cancelled) == ((), 1)
    with pytest.raises(aiohttp.ClientError):
        await waiting


async def test_late_call_that_no_engine_ends_is_infrastructure(
    slow: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_rollouts, "EXPIRE_S", 0.1)
    engine: Any = slow.loop
    late = asyncio.create_task(slow.post(_chat(), base=slow.rollout().base_url))
    await _until_decoding(engine)
    engine.stands_still.set()
    await slow.gateway.expire_rollout("r1")
    assert slow.gateway.close_rollout("r1").unanswered == ("call_timeout",)
    with pytest.raises(aiohttp.ClientError):
        await late
