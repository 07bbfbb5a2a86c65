"""Tests that GET /metrics counts answers and failures, and /healthz tells if calls are accepted."""

import asyncio
import json

from gateway_bench import BODY, LONG, Bench, MakeBench
from prometheus_client import parser

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.app import Gateway

SEARCH = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}


async def _metrics(bench: Bench) -> dict[str, float]:
    """Return every sample by name and labels, such as `calls_total chat 200`. Send no key."""
    async with bench.http.get(f"{bench.gateway.url}/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=1.0.0")
        text = await response.text()
    samples = [
        sample
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return {
        " ".join([sample.name.removeprefix("lightning_"), *sample.labels.values()]): sample.value
        for sample in samples
    }


async def _health(bench: Bench) -> tuple[int, str]:
    async with bench.http.get(f"{bench.gateway.url}/healthz") as response:
        return response.status, (await response.json())["status"]


async def test_calls_are_counted_by_dialect_and_status(bench: Bench) -> None:
    await bench.post(BODY)
    await bench.post(BODY | {"temperature": -1})
    await bench.post(BODY, key="wrong")
    async with bench.http.post(
        f"{bench.gateway.url}/v1/chat/completions",
        json=BODY | {"stream": True},
        headers={"Authorization": "Bearer right-key"},
    ) as response:
        await response.read()
    found = await _metrics(bench)
    assert found["calls_total chat 200"] == 2
    assert found["calls_total chat 400"] == found["calls_total chat 401"] == 1
    assert found["call_seconds_count chat"] == 4
    assert found["first_token_seconds_count chat"] == 2
    assert 0 < found["first_token_seconds_sum chat"] < found["call_seconds_sum chat"]


async def test_the_engines_counters_are_there(bench: Bench) -> None:
    await bench.post(BODY)
    async with asyncio.timeout(20):
        while bench.loop.stats()["serve/queue_depth"]:  # a call is removed just after its answer
            await asyncio.sleep(0.01)
    found, stats = await _metrics(bench), bench.loop.stats()
    for name in (
        *("requests", "cancelled", "steps", "adjusted_steps", "tokens_generated", "tokens_forced"),
        *("prefill_tokens", "prefix_hit_tokens", "compiles"),
    ):
        assert found[f"serve_{name}_total"] == stats[f"serve/{name}"]
    assert found["serve_running"] == found["serve_queue_depth"] == 0
    assert found["serve_requests_total"] == 1 and found["serve_tokens_generated_total"] > 0


async def test_hangups_have_a_separate_count(bench: Bench) -> None:
    call = asyncio.create_task(bench.post(LONG))
    async with asyncio.timeout(20):
        while (await _metrics(bench))["serve_running"] == 0:
            await asyncio.sleep(0.01)
        call.cancel()
        while "calls_total chat 499" not in (found := await _metrics(bench)):
            await asyncio.sleep(0.01)
    assert found["calls_total chat 499"] == 1


async def test_a_stream_that_breaks_counts_as_its_error(bench: Bench) -> None:
    async with bench.http.post(
        f"{bench.gateway.url}/v1/chat/completions",
        json=LONG | {"stream": True},
        headers={"Authorization": "Bearer right-key"},
    ) as response:
        await response.content.readline()
        bench.loop.close()
        assert "engine_error" in (await response.read()).decode()
    found = await _metrics(bench)
    assert found["calls_total chat 500"] == 1 and "calls_total chat 200" not in found


async def test_what_costs_the_trainer_is_counted_over_all_rollouts(bench: Bench) -> None:
    for rollout_id in ("r1", "r2"):
        base = bench.rollout(rollout_id).base_url
        _, reply, _ = await bench.post(BODY, base=base)
        _, joined, _ = await bench.post(BODY, base=base, **{"x-stainless-retry-count": "1"})
        assert joined["id"] == reply["id"]
        edited = [
            {"role": "user", "content": "Say something else."},
            reply["choices"][0]["message"],
            {"role": "user", "content": "Go on."},
        ]
        await bench.post(BODY | {"messages": edited}, base=base)
        bench.gateway.close_rollout(rollout_id)
    found, stats = await _metrics(bench), bench.gateway.stats()
    assert found["joined_calls_total"] == stats["serve/joined_calls"] == 2
    assert found["prefix_breaks_total"] == stats["serve/prefix_breaks"] == 2
    assert found["malformed_tool_calls_total"] == stats["serve/malformed_tool_calls"] == 0


async def test_a_malformed_tool_call_is_counted_outside_of_rollouts_too(bench: Bench) -> None:
    # Force the policy to write a string that looks like a call instead of a call.
    schema = {"const": "<tool_call>nonsense</tool_call>"}
    form = {"type": "json_schema", "json_schema": {"name": "said", "schema": schema}}
    (bracket,) = bench.model.tokenizer.encode("<")
    body = BODY | {"tools": [SEARCH], "max_tokens": 60, "response_format": form}
    status, reply, _ = await bench.post(body | {"logit_bias": {str(bracket): -100}})
    assert (status, reply["choices"][0]["message"]["content"]) == (200, json.dumps(schema["const"]))
    assert (await _metrics(bench))["malformed_tool_calls_total"] == 1


async def test_two_gateways_have_separate_counts(make_bench: MakeBench) -> None:
    async with make_bench() as one, make_bench() as two:
        await one.post(BODY)
        assert (await _metrics(one))["calls_total chat 200"] == 1
        assert "calls_total chat 200" not in await _metrics(two)


async def test_health_follows_the_engine(bench: Bench) -> None:
    assert await _health(bench) == (200, "ok")
    running = asyncio.create_task(bench.post(LONG))
    async with asyncio.timeout(20):
        while bench.loop.stats()["serve/running"] == 0:
            await asyncio.sleep(0.01)
    draining = asyncio.create_task(bench.loop.drain())
    await asyncio.sleep(0)
    assert await _health(bench) == (503, "draining")
    status, refused, headers = await bench.post(BODY)
    assert (status, refused["error"]["code"], headers["Retry-After"]) == (503, "draining", "5")
    assert (await running)[0] == 200
    await draining
    bench.loop.close()
    assert await _health(bench) == (503, "failed")


async def test_a_gateway_without_a_store_answers(bench: Bench) -> None:
    gateway = Gateway(bench.loop, records=False, serve=ServeConfig(api_key="k"))
    await gateway.start()
    status, reply, _ = await bench.post(BODY, base=gateway.url, key="k")
    assert status == 200 and reply["usage"]["completion_tokens"] > 0
    status, reply, _ = await bench.post(BODY | {"n": 2}, base=gateway.url, key="k")
    assert status == 200 and len(reply["choices"]) == 2
    status, _, _ = await bench.post(BODY, base=f"{gateway.url}/rollout/r1~x", key="k")
    assert status == 404
    await gateway.close()
    assert bench.store.spans(None) == []
