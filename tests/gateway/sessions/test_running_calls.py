"""Tests of shared calls: who joins which, and when a call without listeners ends.

A retry joins its first try, with one sample and one span, and other calls do not.
"""

import asyncio
import gc
import threading
import weakref
from typing import Any

import openai
import pytest
from gateway_bench import BODY as SHORT
from gateway_bench import LONG, Bench
from waiting import until

from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.calls import responder
from lightning_jax.gateway.calls.offload import INLINE_BYTES
from lightning_jax.gateway.dialects.base import ReplyContext
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.sessions import running_calls
from lightning_jax.gateway.sessions.running_calls import (
    RunningCall,
    RunningCalls,
    declared_timeout_s,
    identity_of,
    is_repetition,
)
from lightning_jax.testing.tiny import tiny_tokenizer

CONTEXT = ReplyContext("x", 0, ((1,),), tiny_tokenizer())
ANSWERS = (Answer((1,), Completion((), "", (), (), (), "stop"), "", (), "stop"),)
DELTAS = [Delta(0, text, (), None) for text in "abc"]


def _shared(gate: asyncio.Event) -> RunningCall:
    async def work(running: RunningCall) -> tuple[Answer, ...]:
        running.accept(CONTEXT)
        for delta in DELTAS:
            await asyncio.sleep(0)
            running.emit(delta)
        await gate.wait()
        return ANSWERS

    return RunningCall(work)


async def _texts(call: RunningCall) -> str:
    with call.listen(lambda: False):
        return "".join([delta.text async for delta in call.deltas() if delta])


async def test_every_listener_hears_all_from_the_beginning() -> None:
    gate = asyncio.Event()
    call = _shared(gate)
    await call.accepted()
    early = asyncio.create_task(_texts(call))
    await asyncio.sleep(0.01)
    late = asyncio.create_task(_texts(call))
    gate.set()
    assert await early == await late == "abc"
    assert await call.answers() == ANSWERS and await _texts(call) == "abc"


async def test_each_listener_is_told_of_a_silence() -> None:
    gate = asyncio.Event()
    call = _shared(gate)

    async def hear(patience_s: float | None) -> tuple[str, int]:
        texts, silences = "", 0
        async for delta in call.deltas(patience_s):
            texts, silences = texts + (delta.text if delta else ""), silences + (delta is None)
            if silences == 3:
                gate.set()
        return texts, silences

    impatient = await asyncio.gather(hear(0.01), hear(0.004), hear(30.0), hear(None))
    assert [texts for texts, _ in impatient] == ["abc"] * 4
    assert impatient[1][1] >= 3 > 0 == impatient[2][1] == impatient[3][1]
    assert await hear(0.01) == ("abc", 0)


async def test_a_refused_call_raises_for_all() -> None:
    async def work(running: RunningCall) -> tuple[Answer, ...]:
        raise invalid("no", "x", reason="conflict")

    call = RunningCall(work)
    for ask in (call.accepted, call.answers):
        with pytest.raises(ApiError) as caught:
            await ask()
        assert (caught.value.param, caught.value.reason) == ("x", "conflict")
    assert not call.joinable()


async def test_the_last_listener_takes_the_call_along() -> None:
    call = _shared(asyncio.Event())
    with call.listen(lambda: False):
        with call.listen(lambda: False):
            pass
        await asyncio.sleep(0.01)
        assert not call.task.done()
    with pytest.raises(asyncio.CancelledError):
        await call.task


async def test_a_call_that_will_be_asked_for_again_goes_on_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_calls, "RETRY_GRACE_S", 0.05)
    gate = asyncio.Event()
    call = _shared(gate)
    with call.listen(lambda: True):
        pass
    await asyncio.sleep(0.01)
    with call.listen(lambda: False):
        await asyncio.sleep(0.1)  # a listener joined, so the end of the grace has no effect
        gate.set()
        assert await call.answers() == ANSWERS
    forgotten = _shared(asyncio.Event())
    with forgotten.listen(lambda: True):
        pass
    await asyncio.sleep(0.01)
    assert not forgotten.task.done()
    await asyncio.wait([forgotten.task], timeout=5)
    assert forgotten.task.cancelled()


async def test_calls_are_found_while_they_may_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, calls = asyncio.Event(), RunningCalls(2**20)
    call = _shared(gate)
    calls.add("a", call)
    assert calls.find("a") is call and calls.find("b") is None
    gate.set()
    await call.answers()
    assert calls.find("a") is call
    monkeypatch.setattr(running_calls, "JOINABLE_S", 0.0)
    assert calls.find("a") is None
    others = [_shared(asyncio.Event()) for _ in range(2)]
    for other in others:
        calls.add("b", other)
    assert calls.find("b") is others[1]
    calls.cancel()
    await asyncio.wait([other.task for other in others])
    assert all(other.task.cancelled() for other in others) and calls.find("b") is None
    calls.add("c", others[0])  # it has ended
    assert calls.find("c") is None


async def test_a_repetition_of_a_call_that_failed_joins_no_other() -> None:
    async def refused(*_: Any) -> Any:
        raise ApiError(429, "queue_full", "the queue is full.")

    gate, calls = asyncio.Event(), RunningCalls(2**20)
    failed, sibling = RunningCall(refused), _shared(gate)
    calls.add("a", failed)
    calls.add("a", sibling)
    await asyncio.wait([failed.task])
    await asyncio.sleep(0)
    assert calls.find("a") is None  # for the refused call
    assert calls.find("a") is sibling
    gate.set()
    await sibling.answers()


async def test_a_call_that_failed_is_not_kept_beside_others() -> None:
    async def refused(*_: Any) -> Any:
        raise invalid("no", "x", reason="conflict")

    gate, calls = asyncio.Event(), RunningCalls(2**20)
    calls.add("a", _shared(gate))
    failed = RunningCall(refused)
    calls.add("b", failed)
    await asyncio.wait([failed.task])
    await asyncio.sleep(0)
    reference = weakref.ref(failed)
    del failed
    gc.collect()
    assert reference() is None
    gate.set()


async def test_repetitions_join_different_abandoned_calls() -> None:
    gate, calls = asyncio.Event(), RunningCalls(2**20)
    heard, *given_up = (_shared(gate) for _ in range(3))
    for call in (*given_up, heard):
        calls.add("a", call)
    for call in given_up:
        with call.listen(lambda: True):
            await call.accepted()
    for call in given_up:  # the first has ended, the second is still running
        assert calls.find("a") is call
        gate.set()
        assert await _texts(call) == "abc"
    assert calls.find("a") is heard


def test_what_makes_a_request_the_same_request() -> None:
    assert identity_of("/a", b"{}", {}) == identity_of("/a", b"{}", {"x": "y"})
    assert len({identity_of(p, b, {}) for p in ("/a", "/b") for b in (b"1", b"2")}) == 4
    key = {"Idempotency-Key": "k"}
    assert identity_of("/a", b"1", key) == identity_of("/a", b"1", key | {"x": "y"})
    assert identity_of("/a", b"1", key) not in (
        identity_of("/a", b"1", {}),
        identity_of("/a", b"2", key),
        identity_of("/b", b"1", key),
    )
    assert is_repetition(key) and is_repetition({"x-stainless-retry-count": "2"})
    for headers in ({}, *({"x-stainless-retry-count": c} for c in ("0", "often", "\u00b2"))):
        assert not is_repetition(headers)
    assert declared_timeout_s({"x-stainless-read-timeout": "2.5"}) == 2.5
    assert declared_timeout_s({}) is None is declared_timeout_s({"x-stainless-read-timeout": "x"})


# Through the gateway

BODY = SHORT | {"max_tokens": 200, "temperature": 1.0}


def _text(reply: Any) -> str:
    return reply["choices"][0]["message"]["content"]


async def test_a_retry_joins_the_call_that_runs(bench: Bench) -> None:
    base = bench.rollout().base_url
    first = asyncio.create_task(bench.post(BODY, base=base))
    await until(lambda: bench.loop.stats()["serve/running"] == 1)
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
    await until(lambda: len(threads) == 1)
    again = asyncio.create_task(bench.post(large, base=base, **{"x-stainless-retry-count": "1"}))
    await until(lambda: bench.gateway.stats()["serve/joined_calls"] == 1)
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
    await until(lambda: bool(bench.store.spans("r1")))
    assert bench.store.spans("r1")[0].error is not None


async def test_nobody_asks_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_calls, "RETRY_GRACE_S", 0.01)
    llm = bench.rollout()
    async with openai.AsyncOpenAI(
        base_url=llm.base_url, api_key=llm.api_key, max_retries=0, timeout=0.1
    ) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**LONG)
    await until(lambda: bench.loop.stats()["serve/running"] == 0)
    await until(lambda: bool(bench.store.spans("r1")))
    assert bench.store.spans("r1")[0].error is not None
