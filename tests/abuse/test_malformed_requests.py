"""Tests that bad bodies, headers and encodings get well-formed errors and the server survives."""

import asyncio
import base64
import copy
import gzip
import json
import random
import zlib
from typing import Any

import pytest
from gateway_bench import Bench
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}

# One body for each dialect, with most of its fields.
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "max_tokens": 2,
        "temperature": 0.5,
        "stop": ["x"],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "stream": False,
        "metadata": {"agent": "a"},
    },
    "/v1/completions": {
        "model": "policy",
        "prompt": [[1, 2], [3]],
        "max_tokens": 2,
        "logprobs": 2,
        "echo": True,
        "n": 1,
        "stop": "x",
        "stream": False,
    },
    "/v1/responses": {
        "model": "policy",
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 2,
        "include": ["message.output_text.logprobs"],
        "stream": False,
    },
    "/v1/messages": {
        "model": "policy",
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 2,
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "stream": False,
    },
    "/api/chat": {
        "model": "policy",
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "tool_name": "f", "content": "1"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "format": {"type": "object"},
        "options": {"temperature": 0.5, "num_predict": 2, "stop": ["x"], "seed": 1},
        "stream": False,
        "keep_alive": "5m",
    },
    "/api/generate": {
        "model": "policy",
        "prompt": "hi",
        "system": "s",
        "raw": False,
        "options": {"num_predict": 2},
        "stream": False,
    },
    "/v1beta/models/policy:generateContent": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": 1}}}]},
            {
                "role": "user",
                "parts": [{"functionResponse": {"name": "f", "response": {"result": 1}}}],
            },
        ],
        "tools": [{"functionDeclarations": [TOOL]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"maxOutputTokens": 2, "temperature": 0.5, "stopSequences": ["x"]},
    },
}
BODIES = 290  # for each dialect: 2,030 in total
GARBAGE: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e308, 10**30, "", "x", "ü\ud800", "a" * 3000, [], {}, [[]]),
    *([None], {"": None}, {"type": "x"}, [{"type": 5}], [1, "a", {}], {"type": ["text"]}),
    *("policy", "gpt-4", float("nan"), float("inf"), -(10**400), {"role": "user"}, "null"),
]


def _paths(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the path of every nested value, including containers."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [p for key, child in items for p in [(*path, key), *_paths(child, (*path, key))]]


def _mutated(valid: dict[str, Any], rng: random.Random) -> bytes:
    """Return the body with 1 to 3 values replaced, removed, repeated or renamed, or garbage."""
    if rng.random() < 0.05:
        raw = json.dumps(valid).encode()
        return rng.choice([raw[: rng.randrange(len(raw))], rng.randbytes(40), b"", b"[" * 2000])
    body: Any = copy.deepcopy(valid)
    for _ in range(rng.choice([1, 1, 2, 3])):
        paths = _paths(body)
        if not paths:
            break
        *parents, key = rng.choice(paths)
        target = body
        for parent in parents:
            target = target[parent]
        match rng.randrange(4):
            case 0 if isinstance(target, dict):
                del target[key]
            case 1 if isinstance(target, list):
                target += [copy.deepcopy(target[key])] * rng.choice([1, 30])
            case 2 if isinstance(target, dict):
                target[rng.choice(["type", "x", "content", ""])] = target.pop(key)
            case _:
                target[key] = copy.deepcopy(rng.choice(GARBAGE))
    return json.dumps(body).encode()


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


@pytest.mark.parametrize("path", VALID)
async def test_only_well_formed_refusals(bench: Bench, path: str) -> None:
    rng = random.Random(path)
    base = bench.rollout(max_tokens=2, call_timeout_s=None).base_url
    status, reply, _ = await bench.post(VALID[path], base=base, path=path)
    assert status == 200, reply
    statuses: set[int] = set()

    async def send(body: bytes) -> None:
        url = base.removesuffix("/v1") + path
        headers = {"Authorization": "Bearer right-key", "Content-Type": "application/json"}
        async with bench.http.post(url, data=body, headers=headers) as response:
            raw = await response.read()
        statuses.add(response.status)
        assert response.status < 500, (body, raw)
        if response.status >= 400:
            assert _has_error_body(path, json.loads(raw)), (body, raw)

    for _ in range(BODIES // 10):
        await asyncio.gather(*(send(_mutated(VALID[path], rng)) for _ in range(10)))
    assert 200 in statuses and 400 in statuses
    assert (await bench.post(VALID[path], base=base, path=path))[0] == 200
    async with bench.http.get(f"{bench.gateway.url}/healthz") as response:
        assert response.status == 200


HEADERS: dict[str, list[str]] = {
    "x-stainless-retry-count": ["9" * 20, "9" * 5000, "²", "٣", "-1", "x", ""],
    "x-stainless-read-timeout": ["nan", "inf", "-1", "1e999", "9" * 5000, "x"],
    "Idempotency-Key": ["", "x" * 4000, "ü\udcff"],
    "x-agent-name": ["", "x" * 4000, "ü\udcff", "a\tb"],
    "traceparent": [f"00-{'0' * 32}-{'0' * 16}-01", f"00-{'f' * 32}-{'e' * 16}-01", "x", "00-"],
    "tracestate": ["x", "a=" + "b" * 3000, ",,=,"],
    "Content-Type": ["", "x", "application/json; charset=utf-32", "multipart/form-data", "a/b;=;"],
    "Content-Encoding": ["gzip", "deflate", "br", "zstd", "identity", "gzip, gzip", "x", "GZIP"],
    "Accept": ["", "x"],
    "Authorization": ["Bearer right-key", "Bearer", "Basic ü\udcff", "Bearer " + "x" * 4000],
    "x-api-key": ["ü\udcff", ""],
    "Expect": ["100-continue"],
}


def _packed(body: bytes, rng: random.Random) -> bytes:
    """Return the body, plain or compressed, and possibly cut or with extra bytes."""
    packed = rng.choice([gzip.compress, zlib.compress, lambda raw: zlib.compress(raw)[2:-4]])(body)
    return rng.choice([body, packed, packed, packed[:-3], packed + b"x", packed * 2, b""])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/traces", "/reward"])
async def test_no_header_or_encoding_is_our_error(
    bench: Bench, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(path)
    url = bench.rollout(max_tokens=2, call_timeout_s=None).base_url.removesuffix("/v1") + path
    statuses: set[int] = set()
    bodies = {"/v1/traces": TRACES, "/reward": {"reward": 1}}
    body = json.dumps(bodies.get(path) or VALID[path]).encode()

    async def send() -> None:
        names = rng.sample(sorted(HEADERS), rng.choice([1, 2, 4]))
        headers = {"Authorization": "Bearer right-key", "Content-Type": "application/json"}
        headers |= {name: rng.choice(HEADERS[name]) for name in names}
        raw = _packed(body, rng) if "Content-Encoding" in names else body
        async with bench.http.post(url, data=raw, headers=headers) as response:
            reply = await response.read()
        statuses.add(response.status)
        assert response.status < 500, (headers, raw, reply)
        assert not reply or json.loads(reply) is not None

    for _ in range(20):
        await asyncio.gather(*(send() for _ in range(10)))
    assert {200, 400} <= statuses
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


TRACES: dict[str, Any] = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "x"}}]},
            "scopeSpans": [
                {
                    "scope": {"name": "s"},
                    "spans": [
                        {
                            "traceId": "0123456789abcdef0123456789abcdef",
                            "spanId": "0123456789abcdef",
                            "parentSpanId": "fedcba9876543210",
                            "name": "tool",
                            "kind": 1,
                            "startTimeUnixNano": "1700000000000000000",
                            "endTimeUnixNano": 1700000000000000001,
                            "attributes": [
                                {"key": "a", "value": {"intValue": "1"}},
                                {"key": "b", "value": {"arrayValue": {"values": [{}]}}},
                                {"key": "c", "value": {"doubleValue": 0.5}},
                            ],
                            "events": [{"name": "exception", "attributes": []}],
                            "status": {"code": 2, "message": "m"},
                        }
                    ],
                }
            ],
        }
    ]
}


async def test_no_export_of_spans_is_our_error(bench: Bench) -> None:
    rng = random.Random("traces")
    base = bench.rollout().base_url
    whole = ExportTraceServiceRequest()
    fields = copy.deepcopy(TRACES)
    (span,) = fields["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for name in ("traceId", "spanId", "parentSpanId"):
        span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    protobuf = json_format.ParseDict(fields, whole).SerializeToString()
    statuses: set[int] = set()

    async def send(url: str) -> None:
        if rng.random() < 0.5:
            raw, kind = _mutated(TRACES, rng), "application/json"
        else:
            raw, kind = bytearray(protobuf), "application/x-protobuf"
            for _ in range(rng.choice([0, 1, 3])):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            raw = bytes(raw[: rng.choice([len(raw), rng.randrange(len(raw))])])
        headers = {"Authorization": "Bearer right-key", "Content-Type": kind}
        async with bench.http.post(url, data=raw, headers=headers) as response:
            reply = await response.read()
        statuses.add(response.status)
        assert response.status < 500, (raw, reply)

    for url in (f"{base}/traces", f"{bench.gateway.url}/v1/traces"):
        for _ in range(30):
            await asyncio.gather(*(send(url) for _ in range(10)))
    assert {200, 400} <= statuses
