"""Bad bodies in every dialect: well-formed refusals only, and the server goes on."""

import asyncio
import copy
import json
import random
from typing import Any

import pytest
from gateway_bench import Bench

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}

# One body of each dialect that uses most of what it has.
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
        "stream_options": {"include_usage": True},
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
BODIES = 290  # of each dialect: 2,030 in all
GARBAGE: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e308, 10**30, "", "x", "ü\ud800", "a" * 3000, [], {}, [[]]),
    *([None], {"": None}, {"type": "x"}, [{"type": 5}], [1, "a", {}], {"type": ["text"]}),
    *("policy", "gpt-4", float("nan"), float("inf"), -(10**400), {"role": "user"}, "null"),
]


def _places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value inside, containers included."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [p for key, child in items for p in [(*path, key), *_places(child, (*path, key))]]


def _mutated(valid: dict[str, Any], rng: random.Random) -> bytes:
    """The body with one to three values replaced, removed, repeated or renamed; or other bytes."""
    if rng.random() < 0.05:
        raw = json.dumps(valid).encode()
        return rng.choice([raw[: rng.randrange(len(raw))], rng.randbytes(40), b"", b"[" * 2000])
    body: Any = copy.deepcopy(valid)
    for _ in range(rng.choice([1, 1, 2, 3])):
        places = _places(body)
        if not places:
            break
        *parents, key = rng.choice(places)
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
    """Whether the refusal has the shape that the dialect's clients read."""
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
    base = bench.rollout(max_tokens=2).base_url
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
