"""Tests of the limits of one rollout, and that other rollouts are served meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from gateway_bench import Bench, Connect, MakeBench

from lightning_jax.gateway.calls.responder import Responder
from lightning_jax.gateway.dialects import openai_chat

BODY: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 8,
}
LONG: dict[str, Any] = BODY | {"max_tokens": 480, "logit_bias": {"258": -100}}  # never ends early


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_calls_over_a_rollouts_limit_are_refused(make_bench: MakeBench) -> None:
    async with make_bench(max_calls_per_rollout=2) as bench:
        base, other = (bench.rollout(name).base_url for name in ("r1", "r2"))
        long = [asyncio.create_task(bench.post(LONG, base=base)) for _ in range(2)]
        await _until(lambda: bench.loop.stats()["serve/running"] == 2)
        status, reply, headers = await bench.post(BODY, base=base)
        assert (status, reply["error"]["code"]) == (429, "too_many_calls")
        assert "serve.max_calls_per_rollout" in reply["error"]["message"]
        assert headers["Retry-After"] == "1"
        assert (await bench.post(BODY, base=other))[0] == 200
        assert bench.gateway.close_rollout("r1").unanswered == ()
        await asyncio.gather(*long, return_exceptions=True)


async def test_choices_over_a_rollouts_limit_are_refused(make_bench: MakeBench) -> None:
    async with make_bench(max_choices_per_rollout=3) as bench:
        base = bench.rollout().base_url
        status, reply, _ = await bench.post(BODY | {"n": 4}, base=base)  # can never succeed
        assert (status, reply["error"]["code"]) == (400, "invalid_value")
        assert "serve.max_choices_per_rollout" in reply["error"]["message"]
        long = asyncio.create_task(bench.post(LONG | {"n": 2}, base=base))
        await _until(lambda: bench.loop.stats()["serve/running"] == 2)
        status, reply, _ = await bench.post(BODY | {"n": 2}, base=base)
        assert (status, reply["error"]["code"]) == (429, "too_many_choices")
        assert (await bench.post(BODY, base=base))[0] == 200
        long.cancel()
        await _until(lambda: bench.loop.stats()["serve/running"] == 0)
        assert (await bench.post(BODY | {"n": 3}, base=base))[0] == 200


async def test_a_retry_of_a_refused_call_does_not_join_an_equal_one(make_bench: MakeBench) -> None:
    async with make_bench(max_choices_per_rollout=2) as bench:
        base, body = bench.rollout().base_url, LONG | {"n": 2}
        first = asyncio.create_task(bench.post(body, base=base))
        await _until(lambda: bench.loop.stats()["serve/running"] == 2)
        assert (await bench.post(body, base=base))[0] == 429
        again = await bench.post(body, base=base, **{"x-stainless-retry-count": "1"})
        assert (again[0], bench.gateway.stats()["serve/joined_calls"]) == (429, 0)
        first.cancel()


async def test_a_call_that_outlives_its_client_counts_as_in_flight(make_bench: MakeBench) -> None:
    """A client that disconnects at its declared timeout leaves the call running for a retry."""
    async with make_bench(max_choices_per_rollout=2) as bench:
        base = bench.rollout().base_url
        patience = {"x-stainless-read-timeout": "0.001"}
        call = asyncio.create_task(bench.post(LONG | {"n": 2}, base=base, **patience))
        await _until(lambda: bench.loop.stats()["serve/running"] == 2)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await bench.post(BODY, base=base))[0] == 429
        assert bench.gateway.close_rollout("r1").unanswered == ()


async def test_more_responses_than_have_room_never_work(make_bench: MakeBench) -> None:
    async with make_bench(max_queue=2) as bench:
        for base in (None, bench.rollout().base_url):
            status, reply, _ = await bench.post(BODY | {"n": 7}, base=base)
            assert (status, reply["error"]["param"]) == (400, "n")
            assert "serve.slots + serve.max_queue" in reply["error"]["message"]
            assert (await bench.post(BODY | {"n": 6}, base=base))[0] == 200


async def test_tokens_of_a_rollout_are_bounded(make_bench: MakeBench) -> None:
    async with make_bench(max_tokens_per_rollout=60) as bench:
        base = bench.rollout().base_url
        answers = [await bench.post(BODY, base=base) for _ in range(3)]
        assert [status for status, _, _ in answers] == [200, 200, 400]
        assert answers[2][1]["error"]["code"] == "too_many_tokens"
        assert (await bench.post(BODY, base=bench.rollout("r2").base_url))[0] == 200


async def test_a_neighbour_is_answered_beside_a_flood(bench: Bench) -> None:
    """While 64 responses of one rollout wait or run, another waits for none of them to end."""
    flooding, honest = (bench.rollout(name) for name in ("flood", "honest"))
    alone = await bench.post(BODY | {"temperature": 0}, base=honest.base_url)
    flood = asyncio.create_task(bench.post(LONG | {"n": 64}, base=flooding.base_url))
    await _until(lambda: bench.loop.stats()["serve/running"] == 3)
    requests = bench.loop.stats()["serve/requests"]
    for _ in range(3):
        beside = await bench.post(BODY | {"temperature": 0}, base=honest.base_url)
        assert beside[0] == 200
        assert beside[1]["choices"] == alone[1]["choices"]
    assert bench.loop.stats()["serve/requests"] < requests + 3 + 32  # most of the flood goes on
    flood.cancel()


async def test_timeout_by_a_rollouts_flood_is_the_agents_fault(bench: Bench) -> None:
    flooding = bench.rollout("flood", call_timeout_s=0.3).base_url
    assert (await bench.post(LONG | {"n": 20}, base=flooding))[0] == 504
    assert bench.gateway.close_rollout("flood").unanswered == ()


async def test_a_retry_that_is_answered_makes_its_failure_good(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bench.rollout().base_url
    with monkeypatch.context() as patch:
        patch.setattr(Responder, "start", Mock(side_effect=OSError("too many open files")))
        assert (await bench.post(BODY, base=base))[0] == 500
        assert (await bench.post(BODY | {"max_tokens": 7}, base=base))[0] == 500
    assert (await bench.post(BODY, base=base))[0] == 200
    assert bench.gateway.close_rollout("r1").unanswered == ("internal_error",)


async def test_a_bug_that_the_request_alone_meets_is_not_infrastructure(
    bench: Bench, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine never saw the call, so every attempt with this request would fail too."""
    base = bench.rollout().base_url
    monkeypatch.setattr(openai_chat, "to_request", Mock(side_effect=KeyError("a bug")))
    status, reply, headers = await bench.post(BODY, base=base)
    assert (status, reply["error"]["code"]) == (500, "internal_error")
    assert headers["x-should-retry"] == "false"
    assert bench.gateway.close_rollout("r1").unanswered == ()


async def test_answers_are_kept_for_a_retry_up_to_a_limit(make_bench: MakeBench) -> None:
    async with make_bench(max_kept_mib_per_rollout=0.02) as bench:  # about 20 tokens
        base = bench.rollout().base_url
        retry = {"x-stainless-retry-count": "1"}
        bodies = [LONG | {"max_tokens": number} for number in (8, 9, 10)]
        firsts = [(await bench.post(body, base=base))[1]["id"] for body in bodies]
        again = [(await bench.post(body, base=base, **retry))[1]["id"] for body in bodies[2:]]
        assert again == firsts[2:]
        oldest = (await bench.post(bodies[0], base=base, **retry))[1]["id"]
        assert oldest != firsts[0]
        assert bench.gateway.close_rollout("r1").num_forgotten == 2
        assert bench.gateway.stats()["serve/forgotten_answers"] == 2
