"""Tests that bad bodies, headers and encodings get well-formed errors and the server survives."""

import asyncio
import base64
import copy
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from gateway_bench import Bench
from google.protobuf import json_format
from malformed import VALID, mutated, odd_headers, packed
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

DIALECTS = [path for path in VALID if path != "/v1/traces"]
BODIES = 290  # for each dialect: 2,030 in total


def _has_error_body(path: str, reply: Any) -> bool:
    """Return whether the error has the format that the dialect's clients expect."""
    error = reply["error"]
    if path.startswith("/api/"):
        return isinstance(error, str) and bool(error)
    if not error["message"]:
        return False
    if path == "/v1/messages":
        return reply["type"] == "error" and bool(error["type"])
    if path.startswith("/v1beta/"):
        return isinstance(error["code"], int) and bool(error["status"])
    return set(error) == {"message", "type", "param", "code"}


async def _send(bench: Bench, url: str, raw: bytes, **headers: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer that is no fault of the server."""
    headers = {"Authorization": "Bearer right-key", "Content-Type": "application/json"} | headers
    async with bench.http.post(url, data=raw, headers=headers) as response:
        reply = await response.read()
    assert response.status < 500, (headers, raw, reply)
    return response.status, reply


async def _many(number: int, send: Callable[[], Awaitable[int]]) -> set[int]:
    """Return the statuses of requests, sent ten at a time."""
    batches = [await asyncio.gather(*(send() for _ in range(10))) for _ in range(number // 10)]
    return {status for batch in batches for status in batch}


@pytest.mark.parametrize("path", DIALECTS)
async def test_only_well_formed_refusals(bench: Bench, path: str) -> None:
    rng = random.Random(path)
    base = bench.rollout(max_tokens=2, call_timeout_s=None).base_url
    status, reply, _ = await bench.post(VALID[path], base=base, path=path)
    assert status == 200, reply

    async def send() -> int:
        body = mutated(VALID[path], rng)
        status, raw = await _send(bench, base.removesuffix("/v1") + path, body)
        assert status < 400 or _has_error_body(path, json.loads(raw)), (body, raw)
        return status

    assert {200, 400} <= await _many(BODIES, send)
    assert (await bench.post(VALID[path], base=base, path=path))[0] == 200
    async with bench.http.get(f"{bench.gateway.url}/healthz") as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/traces", "/reward"])
async def test_no_header_or_encoding_is_our_error(
    bench: Bench, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(path)
    url = bench.rollout(max_tokens=2, call_timeout_s=None).base_url.removesuffix("/v1") + path
    body = json.dumps(VALID.get(path, {"reward": 1})).encode()

    async def send() -> int:
        headers = odd_headers(rng)
        raw = packed(body, rng) if "Content-Encoding" in headers else body
        status, reply = await _send(bench, url, raw, **headers)
        assert not reply or json.loads(reply) is not None
        return status

    assert {200, 400} <= await _many(200, send)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_no_export_of_spans_is_our_error(bench: Bench) -> None:
    rng = random.Random("traces")
    base = bench.rollout().base_url
    fields = copy.deepcopy(VALID["/v1/traces"])
    (span,) = fields["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for name in ("traceId", "spanId", "parentSpanId"):
        span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    whole = json_format.ParseDict(fields, ExportTraceServiceRequest()).SerializeToString()

    def damaged() -> bytes:
        raw = bytearray(whole)
        for _ in range(rng.choice([0, 1, 3])):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw[: rng.choice([len(raw), rng.randrange(len(raw))])])

    for url in (f"{base}/traces", f"{bench.gateway.url}/v1/traces"):

        async def send(url: str = url) -> int:
            if rng.random() < 0.5:
                return (await _send(bench, url, mutated(VALID["/v1/traces"], rng)))[0]
            kind = {"Content-Type": "application/x-protobuf"}
            return (await _send(bench, url, damaged(), **kind))[0]

        assert {200, 400} <= await _many(300, send)
