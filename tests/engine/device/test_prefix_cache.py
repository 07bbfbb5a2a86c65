"""Tests that caching changes only how much is computed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from engine_bench import SERVE, full_logprobs, greedy, with_pages

from lightning_jax.engine.device.prefix_cache import MIN_REUSE, PrefixCache, Row
from lightning_jax.engine.device.radix import PAGE
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import Completion

QUEUE = replace(SERVE, max_queue=400)


@contextmanager
def running(model, engine: SlotPrograms, *, start: bool = True) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, model.params, 0, model.tokenizer, QUEUE)
    if start:
        loop.start()
    yield loop
    loop.close()


def check(model, ids: list[int], result: Completion) -> None:
    """Check the result against one pass over all tokens without a cache."""
    expected = full_logprobs(model, [*ids, *result.token_ids])[len(ids) - 1 : -1]
    assert result.token_ids == tuple(expected.argmax(axis=1).tolist())
    np.testing.assert_allclose(result.behavior_logprobs, expected.max(axis=1), atol=1e-5)


def random_ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


# No cache; room for all; so little room that every conversation evicts another's pages.
@pytest.mark.parametrize("num_pages", [0, 60, 7])
async def test_a_request_gets_the_same_whatever_is_cached(model, engine, num_pages):
    history = random_ids(0, 88)
    # Every prompt reuses pages from prompts of other lengths, and so from other chunks.
    lengths = (40, 9, 70, 17, 33, 88, 16, 41, 71, 88, 2, 40)
    with running(model, with_pages(engine, num_pages)) as loop:
        for turn, length in enumerate(lengths):
            prompts = [history[:length], [*history[: length // 2], *random_ids(turn, 20)]]
            results = await asyncio.gather(*(loop.submit(p, greedy(5)).result() for p in prompts))
            for ids, result in zip(prompts, results, strict=True):
                check(model, ids, result)
            longer = [*prompts[1], *results[1].token_ids, 5, 6, 7]
            check(model, longer, await loop.submit(longer, greedy(4)).result())
        stats = loop.stats()
    assert (stats["serve/prefix_hit_tokens"] > 0) == (num_pages > 0)
    assert (stats["serve/prefix_cache_evicted_pages"] > 0) == (num_pages == 7)
    assert stats["serve/prefix_cache_pages_used"] <= num_pages


async def test_siblings_that_come_together_compute_their_prompt_once(model, engine):
    ids = random_ids(1, 75)  # not a whole number of pages
    with running(model, with_pages(engine, 60)) as loop:
        generations = [loop.submit(ids, greedy(6)) for _ in range(16)]
        for generation in generations:
            check(model, ids, await generation.result())
        stats = loop.stats()
    assert stats["serve/prefill_tokens"] == 74
    assert stats["serve/prefix_hit_tokens"] == 15 * 74


async def test_groups_that_come_mixed_compute_each_prompt_once_and_the_rest_together(model, engine):
    shared = [random_ids(i, 50) for i in (1, 2)]
    prompts = [[*shared[i % 2], *random_ids(10 + i // 4, 5 + i)] for i in range(16)]
    prompts += [shared[0][:3], [9], shared[0][:3]]  # too short for a copy
    with running(model, with_pages(engine, 60), start=False) as loop:
        generations = [loop.submit(ids, greedy(6)) for ids in prompts]
        loop.start()
        for ids, generation in zip(prompts, generations, strict=True):
            check(model, ids, await generation.result())
        stats = loop.stats()
    num_distinct = sum(len(ids) - 1 for ids in prompts) - 14 * 50  # 50 shared tokens once per group
    assert stats["serve/prefill_tokens"] <= num_distinct
    assert (
        stats["serve/prefill_tokens"] + stats["serve/prefix_hit_tokens"] == num_distinct + 14 * 50
    )


async def test_turns_find_their_history_though_others_had_the_rows(model, engine):
    conversations = [random_ids(i, 20) for i in range(12)]  # three times the slots
    with running(model, with_pages(engine, 72)) as loop:
        for turn in range(4):
            before = loop.stats()["serve/prefill_tokens"]
            results = await asyncio.gather(
                *(loop.submit(ids, greedy(8)).result() for ids in conversations)
            )
            computed = loop.stats()["serve/prefill_tokens"] - before
            # After the first turn, only the last token of the last response and three new ones.
            assert computed == 12 * (4 if turn else 19) - (12 if turn else 0)
            for i, result in enumerate(results):
                check(model, conversations[i], result)
                conversations[i] = [*conversations[i], *result.token_ids, 7, i, 9]


async def test_waiting_conversations_keep_their_pages_in_a_pool_too_small_for_all(model, engine):
    conversations = [random_ids(i, 40) for i in range(12)]
    with running(model, with_pages(engine, 18)) as loop:  # half of the pages needed
        for turn in range(2):
            before = loop.stats()["serve/prefix_hit_tokens"]
            with loop._changed:  # all arrive in one turn
                generations = [loop.submit(ids, greedy(2)) for ids in conversations]
            for generation in generations:
                await generation.result()
            hits = loop.stats()["serve/prefix_hit_tokens"] - before
            assert hits == 0 if turn == 0 else hits >= 4 * 39


async def test_hundreds_of_requests_need_no_more_memory_than_there_is(model, engine):
    shared = random_ids(2, 30)
    prompts = [[*shared[: 3 * (i % 11)], *random_ids(i, 1 + i % 50)] for i in range(200)]
    most = 0.0
    with running(model, with_pages(engine, 5)) as loop:
        generations = [loop.submit(ids, greedy(1 + i % 5)) for i, ids in enumerate(prompts)]
        generations[150].cancel()
        for i, generation in enumerate(generations):
            result = await generation.result()
            assert i == 150 or len(result.token_ids) == 1 + i % 5
            if i % 20 == 0:
                check(model, prompts[i], result)
            most = max(most, loop.stats()["serve/prefix_cache_pages_used"])
        tree = loop._batcher._prefixes.tree
        assert 0 < most <= 5 and loop.stats()["serve/running"] == 0
        assert all(node is None or node.pins == 0 for node in tree._nodes)


async def test_the_next_turn_of_a_request_that_saw_new_weights_computes_all(
    model, engine, other_params
):
    ids = random_ids(3, 40)
    with running(model, with_pages(engine, 60)) as loop:
        await loop.submit(ids, greedy(2)).result()
        assert loop.stats()["serve/prefix_cache_pages_used"] > 0
        generation = loop.submit(ids, greedy(30))
        # They pin pages of the old weights. Some run before the swap, others after it.
        waiting = [loop.submit([*ids[:30], 256], greedy(8)) for _ in range(8)]
        async for _ in generation:
            break
        loop.load_weights(other_params, 1)
        result = await generation.result()
        assert set(result.policy_versions) == {0, 1}
        for other in waiting:
            await other.result()
        before = loop.stats()["serve/prefix_hit_tokens"]
        turn = [*ids, *result.token_ids]
        fresh = await loop.submit(turn, greedy(4)).result()
        # Only pages computed by the others with the new weights.
        assert loop.stats()["serve/prefix_hit_tokens"] - before == 30
    check(replace(model, params=other_params), turn, fresh)


def test_old_keys_and_short_matches_are_not_used(engine):
    prefixes, state = PrefixCache(with_pages(engine, 8), 0), engine.init_state()
    ids = random_ids(4, 2 * PAGE)
    prefixes.keep(state, [Row(0, ids, 0)])
    assert prefixes.tree.num_used == 2
    short, long = ids[: MIN_REUSE - 1], [*ids[:MIN_REUSE], 300]
    state, lengths = prefixes.restore(state, [Row(1, short, 0), Row(2, long, 0)])
    assert lengths == [0, MIN_REUSE]
    node = prefixes.tree.match(ids).node
    prefixes.tree.pin(node)
    prefixes.tree.reset(1)
    prefixes.keep(state, [Row(0, ids, 0)])
    assert prefixes.tree.num_used == 0 and prefixes.restore(state, [Row(1, ids, 0)])[1] == [0]
    prefixes.tree.unpin(node)


def test_the_end_of_a_row_that_is_no_whole_page_stays_out(model):
    serve = replace(SERVE, slots=1, max_len=40)
    one = SlotPrograms(model.config, serve)
    prefixes = PrefixCache(one, 0)
    prefixes.keep(one.init_state(), [Row(0, random_ids(5, 40), 0)])
    assert prefixes.tree.num_used == 2
