"""Tests of two policies behind one loop: only a policy's own weights answer its requests."""

import asyncio
from collections.abc import Iterator

import pytest

from lightning_jax.engine.by_policy import LoopsByPolicy
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.testing.tiny import tiny_model

SERVE = ServeConfig(slots=2, max_len=64, prefill_buckets=(32,))
MODELS = [tiny_model(seed, num_layers=1) for seed in range(2)]
PROMPT = tuple(range(40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture
def loops() -> Iterator[list[Engine]]:
    programs = [SlotPrograms(MODELS[0].config, SERVE)]
    made = [Engine(model, SERVE, programs=programs) for model in MODELS]
    for loop in made:
        loop.start()
    yield made
    for loop in made:
        loop.close()


def test_neither_policy_reads_what_the_other_computed(loops: list[Engine]) -> None:
    """Both have the prompt in their prefix cache when it is sent again."""
    front = LoopsByPolicy(loops)

    async def ask(adapter: int) -> Completion:
        return await front.submit(PROMPT, GREEDY, adapter).result()

    async def ask_all() -> list[Completion]:
        return [await ask(adapter) for adapter in (0, 1, 0, 1)]

    first, second, *again = asyncio.run(ask_all())
    assert first.behavior_logprobs != pytest.approx(second.behavior_logprobs, abs=1e-3)
    for before, after in zip((first, second), again, strict=True):
        assert after.token_ids == before.token_ids
        assert after.behavior_logprobs == pytest.approx(before.behavior_logprobs, abs=1e-5)
    stats = front.stats()
    assert stats["serve/requests"] == 4.0 and stats["serve/prefix_hit_tokens"] > 0.0
    assert stats["serve/compiles"] == loops[0].stats()["serve/compiles"]


def test_a_place_that_is_none_and_a_loop_that_failed(loops: list[Engine]) -> None:
    front = LoopsByPolicy(loops)
    for adapter in (None, 2, -1):
        with pytest.raises(InvalidValue) as caught:
            front.submit(PROMPT, GREEDY, adapter)
        assert (caught.value.key, caught.value.reason) == ("adapter", "unknown")
    assert front.status == "ok"
    loops[1].close()
    assert front.status == "failed"
