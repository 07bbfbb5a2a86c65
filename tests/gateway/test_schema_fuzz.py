"""Tests that each call with a hostile schema ends in an answer or an error, and the server
survives.
"""

import asyncio
import collections
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from gateway_bench import Bench, MakeBench
from schema_fuzz import SchemaFuzzer

MINUTES = float(os.environ.get("SCHEMA_FUZZ_MINUTES", "2"))
SEED = int(os.environ.get("SCHEMA_FUZZ_SEED", "0"))
CALLERS = 4
ASK = [{"role": "user", "content": "?"}]
REFUSALS = ("invalid_schema", "invalid_value", "invalid_type", "context_length_exceeded")


def body_of(schema: Any, kind: int) -> dict[str, Any]:
    """Return a call that must follow the schema, in one of two ways."""
    body: dict[str, Any] = {"model": "policy", "messages": ASK, "max_tokens": 24}
    if kind == 0:
        function = {"name": "f", "parameters": schema}
        tools = [{"type": "function", "function": function}]
        return body | {"tools": tools, "tool_choice": "required"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return body | {"response_format": form}


async def fuzz(bench: Bench, fuzzer: SchemaFuzzer, until: float, outcomes: dict[str, int]) -> None:
    """Send schemas until the time is up, and count the outcomes of the calls."""
    number = 0
    while time.monotonic() < until:
        number += 1
        schema = fuzzer.schema()
        if not isinstance(schema, dict):
            schema = {"properties": {"x": schema}, "required": ["x"]}
        body = json.dumps(body_of(schema, number % 2)).encode()
        try:
            status, reply, _ = await bench.post(body)
        except TimeoutError:  # on a busy machine; the neighbour's wait is what counts
            outcomes["client gave up"] += 1
            continue
        code = reply["choices"][0]["finish_reason"] if status == 200 else reply["error"]["code"]
        outcomes[f"{status} {code}"] += 1
        assert status == 200 or (status == 400 and code in REFUSALS), (status, reply, body)


async def neighbour(bench: Bench, until: float) -> float:
    """Request eight plain tokens repeatedly, and return the longest wait in seconds."""
    longest = 0.0
    plain = {"model": "policy", "messages": ASK, "max_tokens": 8, "logit_bias": {"258": -100}}
    while not longest or time.monotonic() < until:
        start = time.monotonic()
        status, reply, _ = await bench.post(plain)
        assert status == 200 and reply["usage"]["completion_tokens"] == 8
        longest = max(longest, time.monotonic() - start)
        await asyncio.sleep(0.2)
    return longest


async def run(
    bench: Bench, report: Callable[[str], None], seconds: float, seed: int
) -> dict[str, int]:
    outcomes: dict[str, int] = collections.Counter()
    await neighbour(bench, 0.0)  # compile everything first
    until = time.monotonic() + seconds
    fuzzers = [SchemaFuzzer(seed * CALLERS + index) for index in range(CALLERS)]
    longest, *_ = await asyncio.gather(
        neighbour(bench, until), *(fuzz(bench, fuzzer, until, outcomes) for fuzzer in fuzzers)
    )
    report(f"seed {seed}, {seconds:.0f} s: {dict(sorted(outcomes.items()))}")
    report(f"grammars: {dict(bench.loop._loops[0]._grammars.counts)}; longest wait {longest:.2f} s")
    return outcomes


@pytest.mark.slow
async def test_server_survives_hostile_schemas(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(line + "\n")

    outcomes = await run(bench, report, 60 * MINUTES, SEED)
    assert sum(outcomes.values()) > 10 * MINUTES
    assert bench.loop.status == "ok"


async def test_known_crashes_are_refused(make_bench: MakeBench) -> None:
    patterns = [{"type": "string", "pattern": f"a{i}.*b"} for i in range(40)]
    async with make_bench(max_grammar_kib=255) as bench:  # no other test shares its compiler
        for schema in (
            {"properties": {"n": {"const": -(2**63)}}},
            {"properties": {"s": {"allOf": patterns}}},
        ):
            for _ in range(2):
                status, reply, _ = await bench.post(body_of(schema, 0))
                assert (status, reply["error"]["code"]) == (400, "invalid_schema")
                assert reply["error"]["param"] == "tools"
        counts = bench.loop._loops[0]._grammars.counts  # a refusal is remembered
        assert counts["crash"] == 1 and counts["time"] + counts["memory"] == 1
        status, reply, _ = await bench.post(body_of({"properties": {"n": {"const": 1}}}, 0))
        assert status == 200
