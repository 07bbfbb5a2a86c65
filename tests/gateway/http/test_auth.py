"""Tests that a rollout's key works only under its own URL and only while the rollout is open."""

import asyncio
from typing import Any

import pytest
from gateway_bench import BODY, Bench
from waiting import until

from lightning_jax.types import Rollout


async def _status(bench: Bench, **to: Any) -> int:
    return (await bench.post(BODY, **to))[0]


async def test_rollout_key_works_only_under_its_url(bench: Bench) -> None:
    one, two = bench.rollout("one"), bench.rollout("two")
    assert len({one.api_key, two.api_key, bench.gateway.api_key}) == 3
    assert await _status(bench, base=one.base_url, key=one.api_key) == 200
    assert await _status(bench, base=two.base_url, key=one.api_key) == 401
    assert await _status(bench, key=one.api_key) == 401
    assert await _status(bench, base=one.base_url, key="") == 401
    for base in (one.base_url, two.base_url, None):
        assert await _status(bench, base=base) == 200  # the gateway's own
    assert [len(bench.store.spans(rollout_id)) for rollout_id in ("one", "two", None)] == [2, 1, 1]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/responses/resp_1", "/api/tags"])
async def test_listings_ask_for_the_same_keys(bench: Bench, path: str) -> None:
    one, two = bench.rollout("one"), bench.rollout("two")
    expected = {one.base_url: True, two.base_url: False, f"{bench.gateway.url}/v1": False}
    for base, is_right in expected.items():
        url = base.removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {one.api_key}"}
        async with bench.http.get(url, headers=headers) as response:
            assert (response.status != 401) == is_right


async def test_a_key_ends_with_its_rollout(bench: Bench) -> None:
    ended = bench.rollout()
    running = asyncio.create_task(
        bench.post(BODY | {"max_tokens": 400}, base=ended.base_url, key=ended.api_key)
    )
    await until(lambda: bench.loop.stats()["serve/running"])
    assert bench.gateway.close_rollout("r1").num_cancelled == 1
    running.cancel()
    await until(lambda: not bench.loop.stats()["serve/running"])
    assert await _status(bench, base=ended.base_url, key=ended.api_key) == 404
    assert await _status(bench, key=ended.api_key) == 401


async def test_only_the_agent_learns_how_its_rollout_ended(bench: Bench) -> None:
    bench.store.add_rollout(Rollout("r1", "t", "g", "train", 0, 0, 1, "queued"))
    bench.store.set_status("r1", "running")
    bench.rollout()
    base = bench.gateway.url + "/rollout/r1~" + "0" * 16
    bench.gateway.close_rollout("r1")
    bench.store.set_status("r1", "scored", reward=1.0)
    for path, key in (("/reward", ""), ("/v1/chat/completions", "right-key")):
        status, reply, _ = await bench.post(BODY, base=base, path=path, key=key)
        assert (status, reply["error"]["code"]) == (404, "rollout_not_found")
        assert "scored" not in reply["error"]["message"]


async def test_a_saved_response_is_its_rollouts_alone(bench: Bench) -> None:
    one, two = bench.rollout("one"), bench.rollout("two")
    ask = {"model": "policy", "input": "Say something.", "max_output_tokens": 4}
    path = "/v1/responses"
    _, reply, _ = await bench.post(ask, base=one.base_url, path=path, key=one.api_key)
    more = ask | {"previous_response_id": reply["id"]}
    for llm, expected in ((two, 400), (one, 200)):
        found = await bench.post(more, base=llm.base_url, path=path, key=llm.api_key)
        assert found[0] == expected
