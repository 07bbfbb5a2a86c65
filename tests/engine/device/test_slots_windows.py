"""Tests that an engine serves a model with windows as one full pass, with and without pages."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_bench import SERVE, Slots, full_logprobs, greedy

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device import slots as slots_module
from lightning_jax.engine.device.radix import PAGE
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.mesh import make_mesh
from lightning_jax.testing.tiny import tiny_model, windowed

WINDOW = 20  # longer than a page, so that pages end within windows
assert WINDOW % PAGE


@pytest.fixture(scope="module")
def windows() -> LoadedModel:
    """Return a model whose first and last layers have a window, and the second one has none."""
    return windowed(tiny_model(0, num_layers=3), WINDOW, 2)


@pytest.fixture(scope="module")
def engine_of_windows(windows: LoadedModel) -> SlotPrograms:
    return SlotPrograms(windows.config, SERVE)


def check_decoding(model: LoadedModel, slots: Slots, ids: list[int], steps: int = 6) -> None:
    """Check the log-probabilities of a slot against one pass over all tokens."""
    slots.begin(1, ids)
    tokens, logprobs = slots.decode([1], steps)
    response = tokens[:, 0].tolist()
    expected = full_logprobs(model, ids + response)[len(ids) - 1 : -1]
    np.testing.assert_allclose(logprobs[:, 0], expected[np.arange(steps), response], atol=1e-5)


@pytest.mark.parametrize("length", [2, WINDOW - 3, 70])
def test_prefill_and_decode_equal_one_full_pass(windows, engine_of_windows, length):
    ids = np.random.default_rng(length).integers(0, 256, length).tolist()
    slots = Slots(engine_of_windows, engine_of_windows.put_on_mesh(windows.params))
    check_decoding(windows, slots, ids)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_long_rows_equal_one_full_pass(windows, monkeypatch, platform):
    """On a CPU the first segments end before the windows."""
    monkeypatch.setattr(slots_module, "platform_of", lambda _: platform)
    serve = ServeConfig(slots=2, max_len=600, prefill_buckets=(64,))
    engine = SlotPrograms(windows.config, serve)
    ids = np.random.default_rng(1).integers(0, 256, 580).tolist()
    check_decoding(windows, Slots(engine, engine.put_on_mesh(windows.params)), ids)


def test_one_and_eight_devices_agree(windows, engine_of_windows):
    wide = SlotPrograms(windows.config, SERVE, mesh=make_mesh(MeshConfig(2, 2, 2)))
    ids = list(range(30, 80))
    results = []
    for engine in (engine_of_windows, wide):
        slots = Slots(engine, engine.put_on_mesh(windows.params))
        slots.begin(1, ids)
        results.append(slots.decode([1], 6))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-5)


async def test_requests_get_the_same_from_pages(windows, engine_of_windows):
    history = np.random.default_rng(0).integers(0, 256, 80).tolist()
    serve: Any = replace(SERVE, max_queue=40)
    loop = EngineLoop(engine_of_windows, windows.params, 0, windows.tokenizer, serve)
    loop.start()
    try:
        for turn, length in enumerate((40, 17, 33, 80, 41, 40)):
            prompts = [history[:length], [*history[: length // 2], *range(turn, turn + 9)]]
            results = await asyncio.gather(*(loop.submit(p, greedy(8)).result() for p in prompts))
            for ids, result in zip(prompts, results, strict=True):
                expected = full_logprobs(windows, [*ids, *result.token_ids])[len(ids) - 1 : -1]
                assert result.token_ids == tuple(expected.argmax(axis=1).tolist())
                np.testing.assert_allclose(
                    result.behavior_logprobs, expected.max(axis=1), atol=1e-5
                )
        assert loop.stats()["serve/prefix_hit_tokens"] > 100
    finally:
        loop.close()
