"""Tests of the running engine through its public methods, under load and under failure."""

import asyncio
import re
import textwrap
from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_bench import SERVE, Bench, full_logprobs, greedy

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.generation import Draining, EngineError, PromptTooLong, QueueFull
from lightning_jax.engine.grammar.compiler import GrammarError
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import LoraConfig
from lightning_jax.testing.tiny import tiny_model, tiny_policies


async def test_more_requests_than_slots_give_what_each_gives_alone(bench: Bench):
    prompts = [bench.ids(f"request number {i}, " + "x" * i) for i in range(10)]
    joint = await asyncio.gather(
        *(bench.loop.submit(ids, greedy(5 + i)).result() for i, ids in enumerate(prompts))
    )
    for i, ids in enumerate(prompts):
        alone = await bench.loop.submit(ids, greedy(5 + i)).result()
        assert alone.token_ids == joint[i].token_ids
        expected = full_logprobs(bench.model, [*ids, *alone.token_ids])[len(ids) - 1 : -1]
        picked = expected[np.arange(len(alone.token_ids)), alone.token_ids]
        np.testing.assert_allclose(joint[i].behavior_logprobs, picked, atol=1e-5)
        assert joint[i].sampling_logprobs == (0.0,) * len(alone.token_ids)


async def test_chunks_add_up_to_the_result(bench: Bench):
    generation = bench.loop.submit(bench.ids("hello"), greedy(12))
    chunks = [chunk async for chunk in generation]
    result = await generation.result()
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == result.token_ids
    assert sum((chunk.behavior_logprobs for chunk in chunks), ()) == result.behavior_logprobs
    assert result.text == bench.model.tokenizer.decode(result.token_ids)
    assert len(result.token_ids) == 12 and result.finish_reason == "length"


async def test_a_seed_repeats_and_no_seed_does_not(bench: Bench):
    ids = bench.ids("seeded")

    async def run(seed: int | None) -> tuple[int, ...]:
        sampling = SamplingParams(seed=seed, max_tokens=12, top_p=0.9)
        return (await bench.loop.submit(ids, sampling).result()).token_ids

    first, noise, again, other = await asyncio.gather(run(7), run(None), run(7), run(2**40 + 7))
    assert first == again == await run(7)
    assert len({first, noise, other, await run(None)}) == 4


async def test_stop_strings_and_end_of_turn_end_a_response(bench: Bench):
    full = await bench.loop.submit(bench.ids("abc"), greedy(12)).result()
    text = bench.model.tokenizer.decode(full.token_ids)
    stop = text[4:6]
    stopped = await bench.loop.submit(bench.ids("abc"), greedy(12, stop=(stop,))).result()
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    assert stopped.token_ids == full.token_ids[: len(stopped.token_ids)]


async def test_only_a_stop_nobody_could_foresee_costs_a_step_more(bench: Bench):
    full = await bench.loop.submit(bench.ids("abc"), greedy(12)).result()
    assert bench.loop.stats()["serve/steps"] == 12
    assert bench.loop.stats()["serve/tokens_past_end"] == 0
    stop = full.text[4:6]
    stopped, other = await asyncio.gather(
        bench.loop.submit(bench.ids("abc"), greedy(12, stop=(stop,))).result(),
        bench.loop.submit(bench.ids("another"), greedy(12)).result(),
    )
    assert len(stopped.token_ids) < 12 == len(other.token_ids)
    stats = bench.loop.stats()
    assert stats["serve/tokens_past_end"] == 1
    assert stats["serve/tokens_generated"] == 12 + len(stopped.token_ids) + 12


async def test_a_full_row_ends_the_response(bench: Bench):
    ids = bench.ids("y" * 90)
    result = await bench.loop.submit(ids, greedy(50)).result()
    assert len(result.token_ids) == SERVE.max_len - 90 and result.finish_reason == "length"


async def test_cancel_frees_the_slot_and_keeps_what_was_sampled(bench: Bench):
    running = [bench.loop.submit(bench.ids("z"), greedy(90)) for _ in range(SERVE.slots)]
    waiting = bench.loop.submit(bench.ids("w"), greedy(2))
    async for _ in running[0]:
        break
    running[0].cancel()
    running[0].cancel()
    cancelled = await running[0].result()
    assert cancelled.finish_reason == "cancelled" and 1 <= len(cancelled.token_ids) < 90
    await waiting.result()
    assert bench.loop.stats()["serve/running"] > 0  # the others have not ended
    late = bench.loop.submit(bench.ids("v"), greedy(90))
    late.cancel()
    assert (await late.result()).finish_reason == "cancelled"
    for generation in running[1:]:
        generation.cancel()
        assert (await generation.result()).finish_reason == "cancelled"
    assert bench.loop.stats()["serve/cancelled"] == SERVE.slots + 1
    assert bench.loop.stats()["serve/running"] == 0


async def test_siblings_and_next_turns_reuse_the_prompt_and_get_the_same_logprobs(bench: Bench):
    ids = bench.ids("schema: t(a, b, c). question: how many?")
    sampling = SamplingParams(max_tokens=6, seed=1)
    first = await bench.loop.submit(ids, sampling).result()
    before = bench.loop.stats()
    again = await bench.loop.submit(ids, sampling).result()
    after = bench.loop.stats()
    assert after["serve/prefill_tokens"] == before["serve/prefill_tokens"]
    assert after["serve/prefix_hit_tokens"] - before["serve/prefix_hit_tokens"] == len(ids) - 1
    assert again.token_ids == first.token_ids
    np.testing.assert_allclose(again.behavior_logprobs, first.behavior_logprobs, atol=1e-5)

    turn = [*ids, *first.token_ids, *bench.ids(" next?")]
    second = await bench.loop.submit(turn, greedy(4)).result()
    # All is reused except the last sampled token, which was never fed, and the new text.
    assert bench.loop.stats()["serve/prefill_tokens"] - after["serve/prefill_tokens"] == 6
    expected = full_logprobs(bench.model, [*turn, *second.token_ids])[len(turn) - 1 : -1]
    picked = expected[np.arange(4), second.token_ids]
    np.testing.assert_allclose(second.behavior_logprobs, picked, atol=1e-5)


async def test_weights_swap_between_steps_and_no_prefix_survives_it(bench: Bench, other_params):
    ids = bench.ids("the weights change under this one")
    generation = bench.loop.submit(ids, greedy(60))
    taken = [chunk async for chunk, _ in _zip(generation, range(5))]
    bench.loop.load_weights(other_params, 3)
    assert bench.loop.version == 3
    result = await generation.result()
    versions = result.policy_versions
    assert set(versions) == {0, 3} and list(versions) == sorted(versions)
    assert len(taken) == 5 and versions[:5] == (0,) * 5

    fresh = await bench.loop.submit(ids, greedy(4)).result()
    assert fresh.policy_versions == (3,) * 4
    assert bench.loop.stats()["serve/prefix_hit_tokens"] == 0
    model = type(bench.model)(
        bench.model.name, bench.model.config, other_params, bench.model.tokenizer
    )
    expected = full_logprobs(model, [*ids, *fresh.token_ids])[len(ids) - 1 : -1]
    picked = expected[np.arange(4), fresh.token_ids]
    np.testing.assert_allclose(fresh.behavior_logprobs, picked, atol=1e-5)
    with pytest.raises(InvalidValue) as caught:
        bench.loop.load_weights(other_params, 3)
    assert (caught.value.key, caught.value.reason) == ("version", "out_of_range")


async def test_the_same_weights_under_a_new_version_keep_their_prefixes(bench: Bench, other_params):
    ids = bench.ids("a frozen policy is asked the same again")
    await bench.loop.submit(ids, greedy(4)).result()
    bench.loop.load_weights(None, 1)
    again = await bench.loop.submit(ids, greedy(4)).result()
    assert again.policy_versions == (1,) * 4
    assert bench.loop.stats()["serve/prefix_hit_tokens"] == len(ids) - 1
    # A following version must not lose weights that the thread has not loaded yet.
    with bench.loop._changed:
        bench.loop.load_weights(other_params, 2)
        bench.loop.load_weights(None, 3)
    fresh = await bench.loop.submit(ids, greedy(4)).result()
    assert fresh.policy_versions == (3,) * 4
    assert bench.loop.stats()["serve/prefix_hit_tokens"] == len(ids) - 1
    assert fresh.behavior_logprobs != pytest.approx(again.behavior_logprobs, abs=1e-3)


async def _zip(generation, numbers):
    for number in numbers:
        yield await anext(generation), number


async def test_a_grammar_ends_its_response_and_forced_tokens_are_marked(bench: Bench):
    sampling = SamplingParams(max_tokens=30, grammar='start: "ab" ("x" | "y") "z"', seed=3)
    result = await bench.loop.submit(bench.ids("q"), sampling).result()
    assert result.text in ("abxz", "abyz") and result.finish_reason == "stop"
    assert result.token_ids[-1] in bench.model.tokenizer.eos_ids
    assert result.forced == (True, True, False, True, True)
    ids = bench.ids("q")
    expected = full_logprobs(bench.model, [*ids, *result.token_ids])[len(ids) - 1 : -1]
    picked = expected[np.arange(5), result.token_ids]
    np.testing.assert_allclose(result.behavior_logprobs, picked, atol=1e-5)
    # Sampling distributions: a single token, then x and y by their odds.
    drawn = picked[2] - np.logaddexp(*expected[2, bench.ids("xy")])
    np.testing.assert_allclose(result.sampling_logprobs, [0, 0, drawn, 0, 0], atol=1e-5)
    assert bench.loop.stats()["serve/tokens_forced"] == 4


async def test_a_plain_request_gets_the_same_beside_adjusted_ones(bench: Bench):
    plain = SamplingParams(max_tokens=20, top_p=0.9, seed=11)
    alone = await bench.loop.submit(bench.ids("plain"), plain).result()
    assert bench.loop.stats()["serve/adjusted_steps"] == 0
    mates = [
        SamplingParams(max_tokens=25, grammar='start: "a"{25}'),
        SamplingParams(max_tokens=25, logit_bias=((5, 100.0),)),
        SamplingParams(max_tokens=25, top_logprobs=20),
    ]
    running = [bench.loop.submit(bench.ids("m"), sampling) for sampling in mates]
    shared = await bench.loop.submit(bench.ids("plain"), plain).result()
    biased = [await generation.result() for generation in running]
    assert biased[0].text == "a" * 25 and set(biased[1].token_ids) == {5}
    assert bench.loop.stats()["serve/adjusted_steps"] >= 20
    assert shared.token_ids == alone.token_ids
    np.testing.assert_allclose(shared.behavior_logprobs, alone.behavior_logprobs, atol=1e-5)
    np.testing.assert_allclose(shared.sampling_logprobs, alone.sampling_logprobs, atol=1e-5)
    assert shared.top_logprobs == ((),) * len(shared.token_ids)


async def test_penalties_count_the_response_as_openai_does(bench: Bench):
    ids = bench.ids("aaaa")  # penalties ignore the prompt
    penalties = {"presence_penalty": 1.5, "frequency_penalty": -0.5}
    sampling = greedy(12, top_logprobs=20, **penalties)
    result = await bench.loop.submit(ids, sampling).result()
    expected = full_logprobs(bench.model, [*ids, *result.token_ids])[len(ids) - 1 : -1]
    for k, token_id in enumerate(result.token_ids):
        scores = expected[k].copy()
        for earlier in set(result.token_ids[:k]):
            scores[earlier] -= result.token_ids[:k].count(earlier) * -0.5 + 1.5
        assert scores.argmax() == token_id
        best = np.argsort(-expected[k])[:20]  # before the penalties
        assert [i for i, _ in result.top_logprobs[k]] == best.tolist()
    tops = [logprob for token in result.top_logprobs for _, logprob in token]
    np.testing.assert_allclose(tops, -np.sort(-expected, axis=1)[:, :20].ravel(), atol=1e-5)


async def test_a_grammar_that_is_wrong_is_refused_and_a_failing_one_fails_alone(bench: Bench):
    with pytest.raises(GrammarError) as refused:
        await bench.loop.prepare("start: nothing")
    assert refused.value.reason == "invalid"
    with pytest.raises(InvalidValue) as caught:
        bench.loop.submit([1], greedy(logit_bias=((259, 1.0),)))
    assert (caught.value.key, caught.value.reason) == ("logit_bias", "out_of_range")
    assert "259" in str(caught.value) and "258" in str(caught.value)
    assert bench.loop.stats()["serve/queue_depth"] == 0
    unknown = bench.loop.submit([1], greedy(grammar="start: nothing"))
    endless = bench.loop.submit([1], greedy(grammar='start: "a" start'))
    other = bench.loop.submit([1], greedy(12))
    assert (await unknown.result()).finish_reason == "error"
    assert (await endless.result()).finish_reason == "error"
    assert (await other.result()).finish_reason == "length"


async def test_refusals_say_what_would_be_right(bench: Bench):
    with pytest.raises(PromptTooLong) as too_long:
        bench.loop.submit([1] * 96, greedy())
    assert {"96", "95"} <= set(re.findall(r"\d+", str(too_long.value)))
    for prompt, reason in (([], "empty"), ([259], "out_of_range")):
        with pytest.raises(InvalidValue) as caught:
            bench.loop.submit(prompt, greedy())
        assert (caught.value.key, caught.value.reason) == ("prompt", reason)
    assert "258" in str(caught.value)
    open_ = [bench.loop.submit([1], greedy(90)) for _ in range(SERVE.slots + SERVE.max_queue)]
    with pytest.raises(QueueFull) as full:
        bench.loop.submit([1], greedy())
    assert "12" in str(full.value)
    for generation in open_:
        generation.cancel()
    for generation in open_:
        assert (await generation.result()).finish_reason == "cancelled"


async def test_drain_finishes_what_is_open_and_takes_no_more(bench: Bench):
    open_ = [bench.loop.submit([i], greedy(8)) for i in range(1, 7)]
    draining = asyncio.create_task(bench.loop.drain())
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        bench.loop.submit([1], greedy())
    await draining
    assert [len((await generation.result()).token_ids) for generation in open_] == [8] * 6


async def test_a_crash_fails_every_request_and_hangs_none(model, engine):
    loop = EngineLoop(engine, {"no": np.zeros(1)}, 0, model.tokenizer, SERVE)
    generations = [loop.submit([1, 2, 3], greedy()) for _ in range(6)]
    loop.start()
    for generation in generations:
        with pytest.raises(EngineError) as caught:
            await asyncio.wait_for(generation.result(), 20)
        assert caught.value.reason == "failed"
        with pytest.raises(EngineError):
            async for _ in generation:
                pass
    with pytest.raises(EngineError):
        loop.submit([1], greedy())
    await asyncio.wait_for(loop.drain(), 5)
    loop.close()


async def test_close_fails_what_is_not_finished(model, engine):
    loop = EngineLoop(engine, model.params, 0, model.tokenizer, SERVE)
    loop.start()
    generation = loop.submit([1], greedy(90))
    loop.close()
    with pytest.raises(EngineError) as caught:
        await generation.result()
    assert caught.value.reason == "closed"


async def test_the_caller_may_donate_its_weights(model, engine):
    copy = jax.tree.map(jax.numpy.array, model.params)
    loop = EngineLoop(engine, copy, 0, model.tokenizer, SERVE)
    jax.tree.map(lambda leaf: leaf.delete(), copy)
    loop.start()
    assert len((await loop.submit([1], greedy(3)).result()).token_ids) == 3
    loop.close()


def test_random_keys_are_used_once():
    """Check all programs that use random keys: initial weights, adapters and sampling."""
    with jax.debug_key_reuse(True):
        model = tiny_policies(LoraConfig(rank=2))
        serve = ServeConfig(slots=2, max_len=40, prefill_buckets=(8,), steps_per_dispatch=3)
        programs = SlotPrograms(model.config, serve)
        loop = EngineLoop(programs, model.params, 0, model.tokenizer, serve)
        loop.warmup()
        assert loop.stats()["serve/compiles"] > 0 and loop.stats()["serve/compiling"] >= 0
        with pytest.raises(jax.errors.KeyReuseError):
            key = jax.random.key(0)
            jax.random.uniform(key)
            jax.random.uniform(key)
    loop.close()


async def test_no_compile_after_warmup():
    model = tiny_model(0, num_layers=1)
    serve = ServeConfig(
        slots=2, max_len=300, prefill_buckets=(64,), prefix_cache_mib=0.06, steps_per_dispatch=3
    )
    loop = EngineLoop(SlotPrograms(model.config, serve), model.params, 0, model.tokenizer, serve)
    loop.warmup()
    compiles = loop.stats()["serve/compiles"]
    loop.start()
    lengths = (1, 5, 17, 80, 150, 270, 299)
    prompts = [list(range(n % 7, n % 7 + n % 200)) + [3] * (n - n % 200) for n in lengths]
    settings = [greedy(4), SamplingParams(max_tokens=4, top_p=0.5), SamplingParams(max_tokens=4)]
    settings += [greedy(4, top_logprobs=3), greedy(4, grammar='start: "a"', presence_penalty=1.0)]
    for sampling in settings:
        for ids in (*prompts[::-1], [*prompts[3], 1, 2, 3]):  # one by one, then all at once
            await loop.submit(ids, sampling).result()
        await asyncio.gather(*(loop.submit(ids, sampling).result() for ids in prompts))
        loop.load_weights(model.params, loop.version + 1)
    stats = loop.stats()
    assert stats["serve/compiles"] == compiles
    assert stats["serve/prefix_hit_tokens"] > 1000 and stats["serve/prefix_cache_evicted_pages"] > 0
    loop.close()


async def test_an_engine_runs_the_loop_of_a_file(model, bench: Bench, tmp_path):
    source = """
    from lightning_jax.engine.loop import EngineLoop

    class Loop(EngineLoop):
        def stats(self):
            return super().stats() | {"serve/mine": 1.0}
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(source))
    serve = replace(SERVE, orchestrator=f"{tmp_path}/mine.py:Loop")
    async with Engine(model, serve, programs=[bench.engine]) as engine:
        ids = bench.ids("abc")
        tokens = (await engine.submit(ids, greedy()).result()).token_ids
        assert tokens == (await bench.loop.submit(ids, greedy()).result()).token_ids
        assert engine.stats()["serve/mine"] == 1.0
