"""Tests of prompts that are filled in parts, between the decode steps of other requests."""

import asyncio

import numpy as np
import pytest
from engine_bench import full_logprobs, greedy

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.decode import Request
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.generation import Generation
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import Completion

CHUNK = 8
SERVE = ServeConfig(slots=4, max_len=256, prefill_buckets=(CHUNK, 32), prefill_s=1e-6)
LONG = [number % 200 for number in range(7, 207)]  # 25 chunks, and a token


@pytest.fixture(scope="module")
def programs(model) -> SlotPrograms:
    return SlotPrograms(model.config, SERVE)


class Turns:
    """Loop whose turns the test takes. Each has time for the shortest chunk only."""

    def __init__(self, model, programs: SlotPrograms, serve: ServeConfig = SERVE) -> None:
        self.loop = EngineLoop(programs, model.params, 0, model.tokenizer, serve)
        # As if it had been measured: a second for each token.
        self.loop._batcher._prompts._pace._slowness = 1.0

    async def take(self) -> None:
        assert self.loop._turn()
        await asyncio.sleep(0)

    async def begin(self, ids: list[int], num_tokens: int = 60) -> tuple[Generation, Request]:
        generation = self.loop.submit(ids, greedy(num_tokens, ignore_eos=True))
        request = self.loop._intake.get(generation)
        assert request is not None
        await self.take()
        return generation, request

    async def end(self, *generations: Generation) -> list[Completion]:
        while any(self.loop._intake.get(generation) for generation in generations):
            await self.take()
        return [await generation.result() for generation in generations]

    def cached(self) -> float:
        return self.loop.stats()["serve/prefix_hit_tokens"]


@pytest.fixture
def turns(model, programs: SlotPrograms) -> Turns:
    return Turns(model, programs)


async def test_a_neighbour_gets_a_token_between_two_chunks(turns: Turns, model):
    neighbour, running = await turns.begin([5, 6, 7])
    generation, request = await turns.begin(LONG, num_tokens=4)
    while request.num_filled < len(LONG) - 1:
        filled, tokens = request.num_filled, len(running.response)
        await turns.take()
        assert request.num_filled - filled <= CHUNK
        assert len(running.response) == tokens + 1
    long, short = await turns.end(generation, neighbour)
    for ids, completion in ((LONG, long), ([5, 6, 7], short)):
        new = completion.token_ids
        expected = full_logprobs(model, [*ids, *new])[len(ids) - 1 : -1]
        assert list(new) == expected.argmax(axis=-1).tolist()
        picked = expected[np.arange(len(new)), new]
        np.testing.assert_allclose(completion.behavior_logprobs, picked, atol=1e-5)


async def test_a_prompt_that_fits_in_the_time_is_filled_in_one_turn(turns: Turns):
    turns.loop._batcher._prompts._pace._slowness = 1e-12
    _, request = await turns.begin(LONG)
    assert request.num_filled == len(LONG) - 1 and request.num_due > 0


async def test_two_long_prompts_take_turns(turns: Turns):
    await turns.begin([5, 6, 7], num_tokens=100)
    _, first = await turns.begin(LONG)
    _, second = await turns.begin(LONG[::-1])
    while first.num_filled < 100:
        await turns.take()
        assert abs(first.num_filled - second.num_filled) <= 2 * CHUNK


async def test_a_cancelled_prompt_frees_its_slot_and_what_is_filled_is_kept(turns: Turns):
    generation, request = await turns.begin(LONG)
    while request.num_filled < 64:
        await turns.take()
    generation.cancel()
    await turns.take()
    completion = await generation.result()
    assert (completion.finish_reason, completion.token_ids) == ("cancelled", ())
    assert turns.loop.stats()["serve/running"] == 0 and request.num_filled == 64
    again, _ = await turns.begin(LONG, num_tokens=2)
    (completion,) = await turns.end(again)
    assert completion.num_cached == 64 and len(completion.token_ids) == 2


async def test_a_sibling_starts_with_what_another_has_filled_so_far(turns: Turns):
    _, first = await turns.begin(LONG)
    sibling = [*LONG[:40], 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    generation, second = await turns.begin(sibling, num_tokens=2)
    while second.num_filled == 0:
        assert second.response.num_cached == 0
        await turns.take()
    assert second.response.num_cached == 40 and first.num_filled < 64
    await turns.end(generation)
    assert first.num_filled < len(LONG) - 1  # it did not wait for the other's whole prompt


async def test_equal_prompts_are_filled_once(turns: Turns):
    generations = [turns.loop.submit(LONG, greedy(2)) for _ in range(4)]
    one, *others = await turns.end(*generations)
    assert all(other.token_ids == one.token_ids for other in others)
    assert turns.loop.stats()["serve/prefill_tokens"] < len(LONG) + 3 * CHUNK
    assert turns.cached() >= 3 * (len(LONG) - CHUNK)


async def test_new_weights_in_the_middle_leave_nothing_of_the_prompt_cached(turns: Turns, model):
    generation, request = await turns.begin(LONG, num_tokens=2)
    while request.num_filled < 64:
        await turns.take()
    turns.loop.load_weights(model.params, 1)
    sibling, _ = await turns.begin(LONG, num_tokens=2)
    (completion, other) = await turns.end(generation, sibling)
    assert completion.policy_versions == other.policy_versions == (1, 1)
    assert turns.cached() == 0


async def test_a_full_pool_lets_no_sibling_wait(model):
    serve = ServeConfig(
        slots=4, max_len=256, prefill_buckets=(CHUNK, 32), prefill_s=1e-6, prefix_cache_mib=0.02
    )
    programs = SlotPrograms(model.config, serve)
    assert 0 < programs.pages.num_pages < 8  # of 13
    turns = Turns(model, programs, serve)
    generations = [turns.loop.submit(LONG, greedy(2)) for _ in range(2)]
    one, other = await turns.end(*generations)
    assert one.token_ids == other.token_ids


async def test_the_longest_wait_for_a_token_is_counted(turns: Turns):
    generation, request = await turns.begin([5, 6, 7])
    while len(request.response) < 2:
        await turns.take()
    before = turns.loop.stats()["serve/longest_wait_s"]
    await asyncio.sleep(before + 0.05)
    await turns.take()
    assert before + 0.05 <= turns.loop.stats()["serve/longest_wait_s"] < before + 1.0
    generation.cancel()
    await turns.end(generation)
