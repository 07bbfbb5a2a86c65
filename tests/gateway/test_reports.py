"""Rewards and spans that agents send reach their rollout, and nothing else does."""

import time
from typing import Any

import pytest
from gateway_bench import Bench
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from lightning_jax.tracing.convert import spans_to_transitions
from lightning_jax.tracing.tracer import trace_id_of

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
    ("body", "status", "words"),
    [
        ({}, 400, "reward is None; expected a finite number"),
        ({"reward": "1"}, 400, "reward is '1'"),
        ({"reward": True}, 400, "reward is True"),
        ({"reward": float("nan")}, 400, "reward is nan"),
        ({"reward": 10**400}, 400, "an integer of 1329 bits"),
        ({"reward": 1, "call": "last"}, 404, "none of the 0 answered calls of rollout 'r1'"),
        ({"reward": 1, "call": 3}, 400, "call is 3; expected a string"),
        (b"[]", 400, "expected a JSON object"),
    ],
)
async def test_a_reward_that_is_none_is_refused(
    bench: Bench, body: Any, status: int, words: str
) -> None:
    answered, reply, _ = await bench.post(body, base=bench.rollout().base_url, path="/reward")
    assert answered == status and words in reply["error"]["message"]
    assert bench.gateway.posted_reward("r1") is None


async def test_a_choice_must_be_one_of_the_calls(bench: Bench) -> None:
    base = bench.rollout().base_url
    await bench.post(BODY | {"n": 2}, base=base)
    body = {"reward": 1, "call": "last", "choice": 2}
    status, reply, _ = await bench.post(body, base=base, path="/reward")
    assert status == 400 and "choice is 2; expected 0 to 1" in reply["error"]["message"]
    await bench.post(body | {"choice": 1}, base=base, path="/reward")
    transitions, _ = spans_to_transitions(bench.store.spans("r1"))
    assert [call.reward for call in transitions] == [0.0, 1.0]


async def test_nobody_rewards_a_rollout_that_has_ended(bench: Bench) -> None:
    base = bench.rollout().base_url
    bench.gateway.close_rollout("r1")
    status, reply, _ = await bench.post({"reward": 1}, base=base, path="/reward")
    assert status == 404 and "expected a running one" in reply["error"]["message"]


def _export(*trace_ids: str) -> bytes:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for number, trace_id in enumerate(trace_ids):
        spans.add(trace_id=bytes.fromhex(trace_id), span_id=bytes([1 + number] * 8), name="tool")
    return request.SerializeToString()


async def _send(bench: Bench, url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    headers |= {"Content-Type": "application/x-protobuf"}
    async with bench.http.post(url, data=body, headers=headers) as response:
        return response.status, await response.read()


async def test_spans_join_the_rollout_of_their_trace(bench: Bench) -> None:
    base = bench.rollout().base_url
    bench.rollout("r2")
    agents_own = "0af7651916cd43dd8448eb211c80319c"
    await bench.post(BODY, base=base, traceparent=f"00-{agents_own}-b7ad6b7169203331-01")
    bench.gateway.close_rollout("r2")  # exporters send in batches, so spans come late
    body = _export(trace_id_of("r1"), agents_own, trace_id_of("r2"), "ff" * 16)
    url = f"{bench.gateway.url}/v1/traces"
    assert (await _send(bench, url, body))[0] == 401
    for _ in range(2):  # an exporter that got no answer sends again
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
    """An instrumented client has a span of the same response, which ends later."""
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


async def test_a_rollouts_own_url_takes_spans_of_any_trace(bench: Bench) -> None:
    base = bench.rollout().base_url
    status, _ = await _send(bench, f"{base}/traces", _export("ab" * 16))
    assert status == 200
    assert [span.trace_id for span in bench.store.spans("r1")] == ["ab" * 16]
    status, answer = await _send(bench, f"{base}/traces", b"\xff")
    assert status == 400 and b"expected an ExportTraceServiceRequest" in answer
    late = ExportTraceServiceRequest()
    late.resource_spans.add().scope_spans.add().spans.add(
        trace_id=b"\x01" * 16, span_id=b"\x01" * 8, start_time_unix_nano=2**63
    )
    status, answer = await _send(bench, f"{base}/traces", late.SerializeToString())
    assert status == 400 and b"after the year 2262" in answer


async def test_posted_rewards_over_the_limit_are_refused(bench: Bench) -> None:
    base = bench.rollout(max_abs_reward=10.0).base_url
    assert (await bench.post(BODY, base=base))[0] == 200
    for told in ({"reward": 1e308}, {"reward": -11}, {"reward": 1e308, "call": "last"}):
        status, reply, _ = await bench.post(told, base=base, path="/reward")
        assert (status, reply["error"]["param"]) == (400, "reward")
        assert "rollout.max_abs_reward" in reply["error"]["message"]
    statuses = [
        (await bench.post({"reward": 4, "call": "last"}, base=base, path="/reward"))[0]
        for _ in range(3)
    ]
    assert statuses == [200, 200, 400]  # 12 together
    (call,), _ = spans_to_transitions(bench.store.spans("r1"))
    assert call.reward == 8.0 and bench.gateway.posted_reward("r1") is None
