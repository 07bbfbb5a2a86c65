"""Tests that agents' rewards and spans reach their own rollout and no other."""

import asyncio
import io
import itertools
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_bench import Bench
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from lightning_jax.gateway.sessions.owners import MAX_EXPORTS
from lightning_jax.traces import attributes, otlp
from lightning_jax.traces.convert import spans_to_transitions

BODY: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 4,
}


async def test_a_reward_for_the_rollout_and_for_its_calls(bench: Bench) -> None:
    base = bench.rollout().base_url
    first = (await bench.post(BODY, base=base))[1]["id"]
    await bench.post(BODY, base=base)
    for path, body in (
        ("/reward", {"reward": 0.25}),
        ("/v1/reward", {"reward": 1}),
        ("/reward", {"reward": -0.5, "call": first}),
        ("/reward", {"reward": 2.0, "call": "last"}),
    ):
        status, answer, _ = await bench.post(body, base=base, path=path, key="")
        assert status == 200 and answer["reward"] == body["reward"]
    assert bench.gateway.posted_reward("r1") == 1.0
    transitions, reasons = spans_to_transitions(bench.store.spans("r1"))
    assert [call.reward for call in transitions] == [-0.5, 2.0] and reasons == {}


@pytest.mark.parametrize(
    ("body", "status", "code", "param", "value"),
    [
        ({}, 400, "invalid_value", "reward", "missing"),
        ({"reward": "1"}, 400, "invalid_type", "reward", "'1'"),
        ({"reward": True}, 400, "invalid_type", "reward", "True"),
        ({"reward": float("nan")}, 400, "invalid_value", "reward", "nan"),
        ({"reward": 10**400}, 400, "invalid_type", "reward", "1329"),
        ({"reward": 1, "call": "last"}, 404, "call_not_found", "call", "'r1'"),
        ({"reward": 1, "call": 3}, 400, "invalid_type", "call", "3"),
        (b"[]", 400, "invalid_value", None, ""),
    ],
)
async def test_a_reward_that_is_none_is_refused(
    bench: Bench, body: Any, status: int, code: str, param: str | None, value: str
) -> None:
    answered, reply, _ = await bench.post(body, base=bench.rollout().base_url, path="/reward")
    error = reply["error"]
    assert (answered, error["code"], error["param"]) == (status, code, param)
    assert value in error["message"]
    assert bench.gateway.posted_reward("r1") is None


async def test_a_choice_must_be_one_of_the_calls(bench: Bench) -> None:
    base = bench.rollout().base_url
    await bench.post(BODY | {"n": 2}, base=base)
    body = {"reward": 1, "call": "last", "choice": 2}
    status, reply, _ = await bench.post(body, base=base, path="/reward")
    assert (status, reply["error"]["param"]) == (400, "choice")
    await bench.post(body | {"choice": 1}, base=base, path="/reward")
    transitions, _ = spans_to_transitions(bench.store.spans("r1"))
    assert [call.reward for call in transitions] == [0.0, 1.0]


async def test_nobody_rewards_a_rollout_that_has_ended(bench: Bench) -> None:
    base = bench.rollout().base_url
    bench.gateway.close_rollout("r1")
    status, reply, _ = await bench.post({"reward": 1}, base=base, path="/reward")
    assert (status, reply["error"]["code"]) == (404, "rollout_not_found")


def _export(*trace_ids: str, span_id: str = "", **attributes: str) -> bytes:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for number, trace_id in enumerate(trace_ids):
        ids = bytes.fromhex(span_id) if span_id else bytes([1 + number] * 8)
        span = spans.add(trace_id=bytes.fromhex(trace_id), span_id=ids, name="tool")
        for key, value in attributes.items():
            span.attributes.add(key=key).value.string_value = value
    return request.SerializeToString()


async def _send(bench: Bench, url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    headers |= {"Content-Type": "application/x-protobuf"}
    async with bench.http.post(url, data=io.BytesIO(body), headers=headers) as response:
        return response.status, await response.read()


async def test_reports_with_what_is_for_calls_alone_do_not_count(bench: Bench) -> None:
    llm = bench.rollout()
    assert (await bench.post(BODY, base=llm.calls_url, key=llm.calls_key))[0] == 200
    for body in ({"reward": 1000}, {"reward": 1000, "call": "last"}):
        for key in (llm.calls_key, llm.api_key):
            status, answer, _ = await bench.post(body, base=llm.calls_url, path="/reward", key=key)
            assert status == 200 and answer["ignored"]
    export = _export(bench.gateway.root_of("r1").trace_id)
    root = llm.calls_url.removesuffix("/v1")
    assert await _rejected(bench, f"{root}/v1/traces", export) == 1
    assert await _rejected(bench, f"{bench.gateway.url}/v1/traces", export, llm.calls_key) == 1
    transitions, reasons = spans_to_transitions(bench.store.spans("r1"))
    assert [call.reward for call in transitions] == [0.0] and reasons == {}
    assert bench.gateway.posted_reward("r1") is None
    assert {span.name for span in bench.store.spans("r1")}.isdisjoint({"reward", "tool"})
    assert bench.gateway.stats()["serve/ignored_reports"] == 6
    assert (await bench.post(BODY, base=llm.base_url, key=llm.api_key))[0] == 200
    assert await _rejected(bench, f"{bench.gateway.url}/v1/traces", export, llm.api_key) == 0


async def _rejected(bench: Bench, url: str, body: bytes, key: str = "") -> int:
    """Return how many spans of an export were refused."""
    status, answer = await _send(bench, url, body, Authorization=f"Bearer {key}")
    assert status == 200
    return ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans


async def test_spans_join_the_rollout_of_their_trace(bench: Bench) -> None:
    base = bench.rollout().base_url
    bench.rollout("r2")
    agent_trace = "0af7651916cd43dd8448eb211c80319c"
    await bench.post(BODY, base=base, traceparent=f"00-{agent_trace}-b7ad6b7169203331-01")
    one, two = (bench.gateway.root_of(rollout_id).trace_id for rollout_id in ("r1", "r2"))
    bench.gateway.close_rollout("r2")  # exporters send in batches, so spans arrive late
    body = _export(one, agent_trace, two, "ff" * 16)
    url = f"{bench.gateway.url}/v1/traces"
    assert (await _send(bench, url, body))[0] == 401
    for _ in range(2):  # an exporter that got no answer retries
        status, answer = await _send(bench, url, body, Authorization="Bearer right-key")
        rejected = ExportTraceServiceResponse.FromString(answer).partial_success
        assert status == 200 and rejected.rejected_spans == 1
    tools = {
        owner: sum(span.name == "tool" for span in bench.store.spans(owner))
        for owner in ("r1", "r2", None)
    }
    assert tools == {"r1": 2, "r2": 1, None: 0}
    assert bench.gateway.stats()["serve/unknown_spans"] == 2


async def test_a_reward_goes_to_the_call_not_to_its_clients_span(bench: Bench) -> None:
    """An instrumented client has a span for the same response, which ends later."""
    base = bench.rollout().base_url
    answered = (await bench.post(BODY | {"n": 2}, base=base))[1]["id"]
    request = ExportTraceServiceRequest()
    now = time.time_ns()
    span = (
        request.resource_spans.add()
        .scope_spans.add()
        .spans.add(
            trace_id=b"\xab" * 16, span_id=b"\x01" * 8, name="client", start_time_unix_nano=now
        )
    )
    attribute = span.attributes.add(key="gen_ai.response.id")
    attribute.value.string_value = answered
    assert (await _send(bench, f"{base}/traces", request.SerializeToString()))[0] == 200
    for call in ("last", answered):
        body = {"reward": 1, "call": call, "choice": 1}
        status, _, _ = await bench.post(body, base=base, path="/reward")
        assert status == 200
    transitions, _ = spans_to_transitions(bench.store.spans("r1"))
    assert [call.reward for call in transitions] == [0.0, 2.0]


async def test_rollout_url_takes_spans_of_any_trace(bench: Bench) -> None:
    base = bench.rollout().base_url
    status, _ = await _send(bench, f"{base}/traces", _export("ab" * 16))
    assert status == 200
    assert [span.trace_id for span in bench.store.spans("r1")] == ["ab" * 16]
    status, answer = await _send(bench, f"{base}/traces", b"\xff")
    assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_value")
    assert b"ExportTraceServiceRequest" in answer
    late = ExportTraceServiceRequest()
    late.resource_spans.add().scope_spans.add().spans.add(
        trace_id=b"\x01" * 16, span_id=b"\x01" * 8, start_time_unix_nano=2**63
    )
    status, answer = await _send(bench, f"{base}/traces", late.SerializeToString())
    assert status == 400 and b"2262" in answer


async def test_posted_rewards_over_the_limit_are_refused(bench: Bench) -> None:
    base = bench.rollout(max_abs_reward=10.0).base_url
    assert (await bench.post(BODY, base=base))[0] == 200
    for report in ({"reward": 1e308}, {"reward": -11}, {"reward": 1e308, "call": "last"}):
        status, reply, _ = await bench.post(report, base=base, path="/reward")
        assert (status, reply["error"]["param"]) == (400, "reward")
        assert "rollout.max_abs_reward" in reply["error"]["message"]
    statuses = [
        (await bench.post({"reward": 4, "call": "last"}, base=base, path="/reward"))[0]
        for _ in range(3)
    ]
    assert statuses == [200, 200, 400]  # 12 in total
    (call,), _ = spans_to_transitions(bench.store.spans("r1"))
    assert call.reward == 8.0 and bench.gateway.posted_reward("r1") is None


async def test_a_rollouts_key_says_whose_spans_they_are(bench: Bench) -> None:
    victim, rollout = bench.rollout("victim"), bench.rollout("own")
    url, theirs = f"{bench.gateway.url}/v1/traces", bench.gateway.root_of("victim").trace_id
    assert await _rejected(bench, url, _export("ab" * 16, theirs), rollout.api_key) == 1
    assert await _rejected(bench, f"{rollout.base_url}/traces", _export(theirs)) == 1
    assert [span.trace_id for span in bench.store.spans("own")] == ["ab" * 16]
    assert bench.store.spans("victim") == []
    assert bench.gateway.stats()["serve/foreign_spans"] == 2
    assert await _rejected(bench, url, _export("ab" * 16, theirs), victim.api_key) == 0
    assert len(bench.store.spans("victim")) == 2  # even with ids that the other rollout has used
    bench.gateway.close_rollout("own")  # exporters send in batches
    assert await _rejected(bench, url, _export("ac" * 16), rollout.api_key) == 0
    assert len(bench.store.spans("own")) == 2


async def test_a_span_with_the_ids_of_a_root_is_refused(bench: Bench) -> None:
    rollout = bench.rollout()
    root = bench.gateway.root_of("r1")
    forged = _export(root.trace_id, span_id=root.span_id)
    assert await _rejected(bench, f"{rollout.base_url}/traces", forged) == 1
    assert await _rejected(bench, f"{bench.gateway.url}/v1/traces", forged, "right-key") == 1
    bench.gateway.close_rollout("r1")
    assert await _rejected(bench, f"{bench.gateway.url}/v1/traces", forged, rollout.api_key) == 1
    bench.store.add_span("r1", root.end("rollout", {}))  # as the runner does
    assert [span.name for span in bench.store.spans("r1")] == ["rollout"]
    assert bench.gateway.stats()["serve/foreign_spans"] == 3


async def test_ids_that_are_recorded_are_not_taken_again(bench: Bench) -> None:
    base = bench.rollout().base_url
    await bench.post(BODY, base=base)
    (call,) = bench.store.spans("r1")
    url = f"{base}/traces"
    assert await _rejected(bench, url, _export(call.trace_id, span_id=call.span_id)) == 1
    assert await _rejected(bench, url, _export("ab" * 16, a="1")) == 0
    assert await _rejected(bench, url, _export("ab" * 16, a="1")) == 0  # sent twice
    assert await _rejected(bench, url, _export("ab" * 16, a="2")) == 1
    again, tool = bench.store.spans("r1")
    assert again == call and tool.attributes == {"a": "1"}
    assert bench.gateway.stats()["serve/foreign_spans"] == 2


async def test_a_traceparent_of_another_rollout_is_ignored(bench: Bench) -> None:
    victim, rollout = bench.rollout("victim"), bench.rollout("own")
    root = bench.gateway.root_of("victim")
    brought = f"00-{'ab' * 16}-{'cd' * 8}-01"
    await bench.post(BODY, base=victim.base_url, traceparent=brought)
    for traceparent in (f"00-{root.trace_id}-{root.span_id}-01", brought):
        await bench.post(BODY, base=rollout.base_url, traceparent=traceparent)
    rollout_root = bench.gateway.root_of("own")
    assert {(span.trace_id, span.parent_span_id) for span in bench.store.spans("own")} == {
        (rollout_root.trace_id, rollout_root.span_id)
    }
    (call,) = bench.store.spans("victim")
    assert (call.trace_id, call.parent_span_id) == ("ab" * 16, "cd" * 8)
    assert bench.gateway.stats()["serve/ignored_traceparents"] == 2


async def test_posted_spans_are_bounded(bench: Bench) -> None:
    base = bench.rollout(max_spans=3, max_spans_mib=0.01).base_url
    url = f"{base}/traces"
    long = _export("aa" * 16, **{"k" * (otlp.MAX_KEY_CHARS + 1): "v", "kept": "v"})
    assert await _rejected(bench, url, long) == 0
    (span,) = bench.store.spans("r1")
    assert span.attributes == {"kept": "v", attributes.DROPPED_ATTRIBUTES: 1}
    assert await _rejected(bench, url, _export("ab" * 16, text="x" * 20_000)) == 1
    assert await _rejected(bench, url, _export(*["ac" * 16] * 4)) == 2
    assert len(bench.store.spans("r1")) == 3
    await bench.post(BODY, base=base)
    body = {"reward": 1.0, "call": "last"}
    status, reply, _ = await bench.post(body, base=base, path="/reward")
    assert (status, reply["error"]["code"]) == (413, "too_many_spans")
    assert "rollout.max_spans" in reply["error"]["message"]
    stats = bench.gateway.stats()
    assert (stats["serve/excess_spans"], stats["serve/dropped_attributes"]) == (3, 1)


async def test_a_call_is_the_last_by_its_answer_not_by_the_clock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bench.rollout().base_url
    clock = itertools.count(2 * 10**18, -3_600 * 10**9)
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    answered = [(await bench.post(BODY, base=base))[1]["id"] for _ in range(3)]
    status, reply, _ = await bench.post({"reward": 1, "call": "last"}, base=base, path="/reward")
    assert (status, reply["call"]) == (200, answered[-1])
    spans = bench.store.spans("r1")
    assert [span.attributes.get(attributes.RESPONSE_ID) for span in spans[:3]] == answered
    transitions, _ = spans_to_transitions(spans)
    assert [call.reward for call in transitions] == [0.0, 0.0, 1.0]


async def test_a_reward_that_comes_whole_after_the_end_is_refused(bench: Bench) -> None:
    base = bench.rollout().base_url
    await bench.post(BODY, base=base)
    url = f"{base}/reward"

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"reward": 1, '
        await asyncio.sleep(0.05)  # the request has been accepted
        bench.gateway.close_rollout("r1")
        yield b'"call": "last"}'

    async with bench.http.post(url, data=slowly()) as response:
        assert response.status == 404
    assert len(bench.store.spans("r1")) == 1


async def test_a_rollout_has_a_limit_of_exports_under_way(bench: Bench) -> None:
    rollout, other = bench.rollout("own"), bench.rollout("other")
    release = asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        body = _export("ab" * 16)
        yield body[:1]  # the client sends headers with the first piece
        await release.wait()
        yield body[1:]

    async def send(base: str, body: Any) -> int:
        headers = {"Content-Type": "application/x-protobuf"}
        async with bench.http.post(f"{base}/traces", data=body, headers=headers) as response:
            return response.status

    started = [
        asyncio.create_task(send(rollout.base_url, waiting())) for _ in range(MAX_EXPORTS + 1)
    ]
    done, others = await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [429]
    assert await send(other.base_url, io.BytesIO(_export("ac" * 16))) == 200
    release.set()
    assert set(await asyncio.gather(*others)) == {200}
    assert await send(rollout.base_url, io.BytesIO(_export("ac" * 16))) == 200


@pytest.mark.parametrize("kind", [otlp.PROTOBUF, otlp.JSON])
async def test_mutated_exports_are_recorded_or_refused(bench: Bench, kind: str) -> None:
    rng = random.Random(kind)
    url = f"{bench.rollout().base_url}/traces"
    request = ExportTraceServiceRequest.FromString(_export("ab" * 16, "ab" * 16, a="b"))
    for span in request.resource_spans[0].scope_spans[0].spans:
        span.status.code = Status.STATUS_CODE_ERROR
        event = span.events.add(name="exception")
        event.attributes.add(key="exception.message").value.array_value.values.add(int_value=1)
        span.attributes.add(key="nested").value.kvlist_value.values.add(key="n")
        span.start_time_unix_nano = 5
    valid = request.SerializeToString()
    if kind == otlp.JSON:
        fields = json_format.MessageToDict(request)
        for number, span in enumerate(fields["resourceSpans"][0]["scopeSpans"][0]["spans"]):
            span |= {"traceId": "ab" * 16, "spanId": f"{number + 1:016x}"}
        valid = json.dumps(fields).encode()
    statuses = set()
    for _ in range(300):
        body = bytearray(valid)
        for _ in range(rng.choice([1, 1, 2, 5])):
            offset = rng.randrange(len(body))
            body[offset : offset + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        headers = {"Content-Type": kind}
        async with bench.http.post(url, data=bytes(body), headers=headers) as response:
            statuses.add(response.status)
    assert statuses == {200, 400}
