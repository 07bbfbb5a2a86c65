"""Tests of shared calls: who joins which, and when a call without listeners ends."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import Answer, Delta
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


def _call(gate: asyncio.Event) -> RunningCall:
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
        return "".join([delta.text async for delta in call.deltas()])


async def test_every_listener_hears_all_from_the_beginning() -> None:
    gate = asyncio.Event()
    call = _call(gate)
    await call.accepted()
    early = asyncio.create_task(_texts(call))
    await asyncio.sleep(0.01)
    late = asyncio.create_task(_texts(call))
    gate.set()
    assert await early == await late == "abc"
    assert await call.answers() == ANSWERS and await _texts(call) == "abc"


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
    call = _call(asyncio.Event())
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
    call = _call(gate)
    with call.listen(lambda: True):
        pass
    await asyncio.sleep(0.01)
    with call.listen(lambda: False):
        await asyncio.sleep(0.1)  # a listener joined, so the end of the grace has no effect
        gate.set()
        assert await call.answers() == ANSWERS
    forgotten = _call(asyncio.Event())
    with forgotten.listen(lambda: True):
        pass
    await asyncio.sleep(0.01)
    assert not forgotten.task.done()
    await asyncio.wait([forgotten.task], timeout=5)
    assert forgotten.task.cancelled()


async def test_calls_are_found_while_they_may_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, calls = asyncio.Event(), RunningCalls(2**20)
    call = _call(gate)
    calls.add("a", call)
    assert calls.find("a") is call and calls.find("b") is None
    gate.set()
    await call.answers()
    assert calls.find("a") is call
    monkeypatch.setattr(running_calls, "JOINABLE_S", 0.0)
    assert calls.find("a") is None
    others = [_call(asyncio.Event()) for _ in range(2)]
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
    failed, sibling = RunningCall(refused), _call(gate)
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
    calls.add("a", _call(gate))
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
    heard, *given_up = (_call(gate) for _ in range(3))
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
