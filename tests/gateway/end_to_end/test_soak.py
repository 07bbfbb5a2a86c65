"""Soak test: a hundred agents disconnect, time out and continue while the weights change.

Not part of `make test`: python -m pytest -m slow tests/gateway/end_to_end/test_soak.py
"""

import asyncio
import gc
import os
import random
import threading
import time
from typing import Any

import aiohttp
import jax
import psutil
import pytest
from gateway_bench import Bench, MakeBench

from lightning_jax.gateway.sessions import running_calls

MINUTES = float(os.environ.get("SOAK_MINUTES", "20"))
AGENTS = 100
PATHS = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/api/generate": lambda text: {"prompt": text},
}


class _Tally:
    """Counts of what the agents saw."""

    answered = hung_up = timed_out = 0


async def _agent(bench: Bench, index: int, until: float, tally: _Tally) -> dict[str, int]:
    """Run rollouts one after another, and return how many calls of each were answered in full."""
    rng, finished = random.Random(index), {}
    number = 0
    while time.monotonic() < until:
        number += 1
        rollout_id = f"{index}-{number}"
        hurried = rng.random() < 0.1
        llm = bench.rollout(rollout_id, index, call_timeout_s=0.05 if hurried else 60.0)
        finished[rollout_id] = 0
        for _ in range(rng.randrange(1, 4)):
            finished[rollout_id] += await _call(bench, llm.base_url, rng, tally)
        bench.gateway.close_rollout(rollout_id)
    return finished


async def _call(bench: Bench, base: str, rng: random.Random, tally: _Tally) -> int:
    path = rng.choice(list(PATHS))
    limit = rng.choice([1, 8, 60])
    body: dict[str, Any] = {"model": "policy", **PATHS[path]("x" * rng.randrange(1, 120))}
    body |= {"max_tokens": limit, "max_output_tokens": limit, "options": {"num_predict": limit}}
    body |= {"stream": rng.random() < 0.5}
    headers = {"Authorization": "Bearer right-key"}
    patience = rng.choice([0.01, 0.1]) if rng.random() < 0.2 else 120.0
    try:
        async with (
            asyncio.timeout(patience),
            bench.http.post(base.removesuffix("/v1") + path, json=body, headers=headers) as reply,
        ):
            raw = await reply.read()
    except (TimeoutError, aiohttp.ClientError):
        tally.hung_up += 1
        return 0
    assert reply.status in (200, 504), raw
    cut = reply.status == 504 or b"call_timeout" in raw or b"rollout.call_timeout_s" in raw
    tally.timed_out += cut
    tally.answered += not cut
    return int(not cut)


async def _swap(bench: Bench, until: float) -> int:
    """Load new weights every second, and return how often."""
    version = 3
    while time.monotonic() < until:
        await asyncio.sleep(1.0)
        version += 1
        scale = 1.0 + 1e-3 * (version % 7)
        params = jax.tree.map(lambda leaf, scale=scale: leaf * scale, bench.model.params)
        await asyncio.to_thread(bench.loop.publish, params, version)
    return version - 3


async def _watch(until: float) -> list[float]:
    """Return resident memory in MiB, ten readings over the second half."""
    start, process = time.monotonic(), psutil.Process()
    readings = []
    for part in range(10):
        moment = start + (until - start) * (0.5 + 0.05 * part)
        await asyncio.sleep(max(0.0, moment - time.monotonic()))
        gc.collect()
        readings.append(process.memory_info().rss / 2**20)
    return readings


@pytest.mark.slow
async def test_nothing_leaks(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_calls, "RETRY_GRACE_S", 0.2)
    async with make_bench(max_queue=4 * AGENTS) as bench:
        tally, threads = _Tally(), threading.active_count()
        until = time.monotonic() + 60 * MINUTES
        watching = asyncio.create_task(_watch(until))
        swapping = asyncio.create_task(_swap(bench, until))
        agents = (_agent(bench, index, until, tally) for index in range(AGENTS))
        finished = {k: n for found in await asyncio.gather(*agents) for k, n in found.items()}
        readings, swaps = await watching, await swapping
        async with asyncio.timeout(30):
            while bench.loop.stats()["serve/running"] or bench.loop.stats()["serve/queue_depth"]:
                await asyncio.sleep(0.1)
        print(  # noqa: T201 (the result, shown with pytest -s)
            f"{len(finished)} rollouts, {tally.answered} calls answered, {tally.hung_up} hung up, "
            f"{tally.timed_out} timed out, {swaps} swaps; MiB {[round(r) for r in readings]}"
        )
        for rollout_id, number in finished.items():
            spans = bench.store.spans(rollout_id)
            whole = [span for span in spans if span.error is None]
            # A call answered just as the agent disconnected is complete but not counted.
            hung_up = len(whole) - number
            assert hung_up >= 0, rollout_id
            assert len({span.span_id for span in spans}) == len(spans)
        assert tally.answered > AGENTS and tally.hung_up > 0 and swaps > 0
        # The thread pools of asyncio and aiohttp grow, but up to a limit.
        assert threading.active_count() <= threads + 32
        assert readings[-1] < readings[0] + 64
    assert not bench.gateway._rollouts and not bench.gateway._calls.working
