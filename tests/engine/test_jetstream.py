"""Tests of JetStream's Driver over our engine: same tokens, log-probabilities and errors."""

import asyncio
import logging
import sys

import numpy as np
import pytest
from engine_bench import SERVE, Bench, greedy

from lightning_jax.engine.generation import Draining, EngineError, PromptTooLong
from lightning_jax.errors import InvalidValue

pytest.importorskip("jetstream")


async def test_concurrent_streams_equal_the_native_loop(bench: Bench, jetstream_loop):
    from jetstream.core import orchestrator
    from jetstream.engine import engine_api

    assert type(jetstream_loop._driver) is orchestrator.Driver
    assert isinstance(jetstream_loop._adapter, engine_api.Engine)
    prompts = [bench.ids(f"request number {i}, " + "x" * i) for i in range(9)]
    texts: list[str] = [""] * len(prompts)

    async def stream(i: int):
        generation = jetstream_loop.submit(prompts[i], greedy(4 + i))
        async for chunk in generation:
            texts[i] += chunk.text
        return await generation.result()

    streamed = await asyncio.gather(*(stream(i) for i in range(len(prompts))))
    for i, ids in enumerate(prompts):
        native = await bench.loop.submit(ids, greedy(4 + i)).result()
        assert streamed[i].token_ids == native.token_ids
        assert (streamed[i].text, streamed[i].finish_reason) == (native.text, native.finish_reason)
        assert texts[i] == native.text
        np.testing.assert_allclose(
            streamed[i].behavior_logprobs, native.behavior_logprobs, atol=1e-5
        )
        assert streamed[i].policy_versions == native.policy_versions


async def test_requests_sample_with_their_own_settings(bench: Bench, jetstream_loop):
    ids = bench.ids("seeded")
    settings = [greedy(8), *(type(greedy())(max_tokens=8, seed=seed, top_k=50) for seed in (1, 2))]
    results = await asyncio.gather(
        *(jetstream_loop.submit(ids, sampling).result() for sampling in settings)
    )
    for sampling, result in zip(settings, results, strict=True):
        native = await bench.loop.submit(ids, sampling).result()
        assert result.token_ids == native.token_ids
        np.testing.assert_allclose(result.sampling_logprobs, native.sampling_logprobs, atol=1e-5)


async def test_cancel_and_stop_free_the_slot_and_drain_waits(bench: Bench, jetstream_loop):
    running = [jetstream_loop.submit(bench.ids("z"), greedy(90)) for _ in range(SERVE.slots)]
    waiting = jetstream_loop.submit(bench.ids("abc"), greedy(90, stop=("\x00\x00",)))
    async for _ in running[0]:
        break
    for generation in running:
        generation.cancel()
    for generation in running:
        assert (await asyncio.wait_for(generation.result(), 20)).finish_reason == "cancelled"
    await asyncio.wait_for(jetstream_loop.drain(), 20)
    assert (await waiting.result()).finish_reason in ("length", "stop")
    with pytest.raises(Draining):
        jetstream_loop.submit([1], greedy())


async def test_it_serves_only(model, jetstream_loop):
    with pytest.raises(EngineError) as refused:
        jetstream_loop.load_weights(model.params, 1)
    assert (refused.value.key, refused.value.reason) == ("serve.orchestrator", "unsupported")
    with pytest.raises(InvalidValue) as caught:
        jetstream_loop.submit([1], greedy(grammar='start: "a"'))
    assert (caught.value.key, caught.value.reason) == ("serve.orchestrator", "unsupported")
    with pytest.raises(PromptTooLong):
        jetstream_loop.submit([1] * 96, greedy())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_failure_fails_the_requests_and_not_the_process(model, engine):
    from lightning_jax.engine.jetstream.loop import JetStreamLoop

    loop = JetStreamLoop(engine, {"no": np.zeros(1)}, 0, model.tokenizer, SERVE)
    loop.start()
    generation = loop.submit([1, 2, 3], greedy())
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(generation.result(), 20)
    assert caught.value.reason == "failed"
    with pytest.raises(EngineError):
        loop.submit([1], greedy())
    loop.close()


def test_importing_it_leaves_the_process_as_it_was(jetstream_loop):
    assert logging.getLogger().level != logging.DEBUG
    streams = [getattr(handler, "stream", None) for handler in logging.getLogger().handlers]
    assert sys.stdout not in streams
    assert "seqio" not in sys.modules
