"""Several decode steps in one go give what one at a time gives."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from lightning_jax.serve.engine import Engine
from lightning_jax.serve.loop import EngineLoop
from lightning_jax.types import Completion, SamplingParams

from .conftest import SERVE, Bench

AT_ONCE = 4


@pytest.fixture(scope="module")
def fast(model) -> Iterator[EngineLoop]:
    serve = replace(SERVE, steps_per_dispatch=AT_ONCE)
    loop = EngineLoop(Engine(model.config, serve), model.params, 0, model.tokenizer, serve)
    loop.start()
    yield loop
    loop.close()


def counted(loop: EngineLoop, before: dict[str, float]) -> dict[str, float]:
    now = loop.stats()
    names = ("serve/steps", "serve/tokens_generated", "serve/tokens_past_end")
    return {name.removeprefix("serve/"): now[name] - before[name] for name in names}


def same(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
    assert one.text == other.text
    np.testing.assert_allclose(one.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


async def test_all_kinds_of_requests_are_answered_as_one_step_at_a_time(bench: Bench, fast):
    kinds = [SamplingParams(seed=n, max_tokens=3 + 3 * n, top_p=0.9) for n in range(5)]
    kinds += [SamplingParams(seed=9, max_tokens=9, top_logprobs=2, presence_penalty=0.5)]
    prompts = [bench.ids("several at once, " + "x" * n) for n in range(len(kinds))]

    async def answers(loop: EngineLoop) -> list[Completion]:
        return await asyncio.gather(
            *(loop.submit(ids, kind).result() for ids, kind in zip(prompts, kinds, strict=True))
        )

    for one, several in zip(await answers(bench.loop), await answers(fast), strict=True):
        same(one, several)


async def test_a_limit_is_never_passed_and_a_stop_wastes_what_was_started(bench: Bench, fast):
    before = fast.stats()
    greedy = SamplingParams(temperature=0.0, max_tokens=2 * AT_ONCE + 3)
    full = await fast.submit(bench.ids("abc"), greedy).result()
    length = len(full.token_ids)
    assert length == 11 and full.finish_reason == "length"
    assert counted(fast, before) == {"steps": 11, "tokens_generated": 11, "tokens_past_end": 0}
    before = fast.stats()
    stopping = replace(greedy, stop=(full.text[4:6],))
    stopped = await fast.submit(bench.ids("abc"), stopping).result()
    same(stopped, await bench.loop.submit(bench.ids("abc"), stopping).result())
    used = len(stopped.token_ids)
    assert used <= AT_ONCE and stopped.finish_reason == "stop"
    # The next ones had been started before the stop was read; what they sampled is for nobody.
    wanted = {"steps": 8, "tokens_generated": used, "tokens_past_end": 2 * AT_ONCE - used}
    async with asyncio.timeout(10):
        while counted(fast, before) != wanted:
            await asyncio.sleep(0.01)


async def test_a_conversation_goes_on_from_what_is_cached(bench: Bench, fast):
    first = bench.ids("a prompt of more than a page, which is sixteen")
    sampling = SamplingParams(seed=3, max_tokens=2 * AT_ONCE)
    reply = (await fast.submit(first, sampling).result()).token_ids
    before = fast.stats()["serve/prefix_hit_tokens"]
    longer = [*first, *reply, *bench.ids(" and then?")]
    same(
        await fast.submit(longer, sampling).result(),
        await bench.loop.submit(longer, sampling).result(),
    )
    assert fast.stats()["serve/prefix_hit_tokens"] - before >= len(first)
