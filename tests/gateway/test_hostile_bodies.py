"""Tests that no body blocks the event loop, whatever its content.

Each body blocked the loop for 2 to 27 s before bodies were bounded. The limit here is generous for
slow machines: `stalls.longest.seconds` is at most about 50 ms.
"""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from gateway_bench import Bench
from stalls import loop_stalls

MIB = 2**20
USER = {"role": "user", "content": "hi"}
CALL_OF_LISTS = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "ARGS"}}],
}


def _chat(messages: list[Any]) -> bytes:
    return json.dumps({"model": "policy", "messages": messages, "max_tokens": 2}).encode()


def _field(number: int, payload: bytes) -> bytes:
    size, length = len(payload), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + payload


# Bodies are built when a test sends them, which together takes seconds and 100 MiB.
CASES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "a million unknown fields": (
        "/chat/completions",
        lambda: _chat([USER])[:-1] + b"".join(b', "k%d": 1' % i for i in range(10**6)) + b"}",
        413,
    ),
    "a wide array": (
        "/chat/completions",
        lambda: b'{"messages":[' + b"1," * 7 * MIB + b"1]}",
        413,
    ),
    "a prompt of 15 MiB": (
        "/chat/completions",
        lambda: _chat([USER | {"content": "x" * 15 * MIB}]),
        400,
    ),
    "a text of 15 MiB": (
        "/completions",
        lambda: json.dumps({"model": "policy", "prompt": "x " * (15 * MIB // 2)}).encode(),
        400,
    ),
    "arguments of two million lists": (
        "/chat/completions",
        lambda: _chat([CALL_OF_LISTS, USER]).replace(b"ARGS", b"[" + b"[]," * 2 * MIB + b"1]"),
        400,
    ),
    "seven million empty spans": (
        "/traces",
        lambda: _field(1, _field(2, b"\x12\x00" * 7 * MIB)),
        400,
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_the_loop_goes_on(bench: Bench, name: str) -> None:
    path, build, status = CASES[name]
    body = build()
    kind = "application/x-protobuf" if path == "/traces" else "application/json"
    headers = {"Authorization": "Bearer right-key", "Content-Type": kind}
    base = bench.rollout().base_url
    request = urllib.request.Request(base + path, body, headers)

    def send() -> int:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    async with loop_stalls() as stalls:
        assert await asyncio.to_thread(send) == status
    print(f"{name}: {stalls.longest}")  # noqa: T201  (pytest shows it with -rP)
    assert stalls.longest.seconds < 1.0
