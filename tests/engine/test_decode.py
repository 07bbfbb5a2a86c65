"""Tests that requests get the same tokens from single steps, several at once, and steps ahead."""

import asyncio
import copy
import itertools
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest
from engine_bench import GRAMMAR, SERVE, Bench, same

from lightning_jax.engine.decode import ReadBound, Request, Stepper, Steps
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.device.table import SlotTable
from lightning_jax.engine.logits import LogitAdjuster
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.system.accelerators import ACCELERATORS, Accelerator

AT_ONCE = 4


@pytest.fixture(scope="module")
def fast(model) -> Iterator[EngineLoop]:
    with running(model, AT_ONCE) as loop:
        yield loop


@contextmanager
def running(
    model: LoadedModel, steps_per_dispatch: int, eos_ids: Iterable[int] = ()
) -> Iterator[EngineLoop]:
    """Start a loop whose steps in one dispatch are compiled, and close it at the end.

    With `eos_ids`, its responses end with these tokens, too.
    """
    serve = replace(SERVE, steps_per_dispatch=steps_per_dispatch)
    programs, tokenizer = SlotPrograms(model.config, serve), copy.copy(model.tokenizer)
    tokenizer.named_eos_ids |= frozenset(eos_ids)
    if steps_per_dispatch > 1:
        params, state = programs.put_on_mesh(model.params), programs.init_state()
        table = SlotTable(SERVE.slots).next_steps(())
        weights = programs._per_step(params)
        programs._generate_steps.compile((1, SERVE.slots), weights, state, table)
    loop = EngineLoop(programs, model.params, 0, tokenizer, serve)
    loop.start()
    try:
        yield loop
    finally:
        loop.close()


def counted(loop: EngineLoop, before: dict[str, float]) -> dict[str, float]:
    now = loop.stats()
    names = ("serve/steps", "serve/tokens_generated", "serve/tokens_past_end")
    return {name.removeprefix("serve/"): now[name] - before[name] for name in names}


def test_the_bound_is_the_time_to_read_weights_and_contexts_by_hand() -> None:
    bound = ReadBound(step_s=0.5, token_s={None: 0.001})
    contexts = np.asarray([10, 20])
    assert bound.seconds(contexts, np.asarray([1, 1]), 1) == pytest.approx(0.5 + 0.030)
    # The second step has contexts of 11 and 21 tokens, the third of 12 and 22.
    threes = np.asarray([3, 3])
    assert bound.seconds(contexts, threes, 3) == pytest.approx(1.5 + 0.030 + 0.032 + 0.034)
    # The first row ends after one token, and both before the last step.
    assert bound.seconds(contexts, np.asarray([1, 3]), 4) == pytest.approx(
        2.0 + 0.030 + 0.021 + 0.022
    )


def test_layers_with_a_window_read_no_more_than_it_has_by_hand() -> None:
    bound = ReadBound(step_s=0.0, token_s={12: 0.001, None: 1.0})
    # Contexts are 10 to 14, of which 10 11 12 12 12 are in the window, 20 and 3.
    contexts, numbers = np.asarray([10, 20, 3]), np.asarray([5, 1, 1])
    assert bound.seconds(contexts, numbers, 5) == pytest.approx(60 + 20 + 3 + 0.057 + 0.012 + 0.003)
    assert bound.seconds(np.asarray([30]), np.asarray([4]), 4) == pytest.approx(126 + 0.048)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_step_reads_all_weights_but_embeddings_beside_a_head(
    model, monkeypatch: pytest.MonkeyPatch, tied: bool, dtype: str, size: int
) -> None:
    config = model.config.with_shape(tie_embeddings=tied)
    programs = SlotPrograms(config, SERVE, dtype=dtype)
    assert ReadBound.of(programs) is None  # on a CPU
    monkeypatch.setitem(ACCELERATORS, "cpu", Accelerator("^cpu$", 1.0, 1000))
    bound, shape = ReadBound.of(programs), config.shape
    assert bound is not None
    # The table, or the head, which has its size.
    table = shape.vocab_size * shape.embed_dim
    layers = sum(
        leaf.size for key, part in model.params.items() if key != "embed"
        for leaf in jax.tree.leaves(part)
    )  # fmt: skip
    assert bound.step_s == pytest.approx(size * (table + layers) / 1000)
    keys = sum(block.mixer.kv_heads * block.mixer.head_dim for block in shape.blocks)
    assert bound.token_s == {None: pytest.approx(size * 2 * keys / 1000)}


async def test_turns_that_decode_are_timed_on_a_known_accelerator(
    model, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "serve/decode_s" not in bench.loop.stats()
    monkeypatch.setitem(ACCELERATORS, "cpu", Accelerator("^cpu$", 1.0, 10**9))
    programs = SlotPrograms(model.config, SERVE)
    bound = ReadBound.of(programs)
    assert bound is not None
    loop = EngineLoop(programs, model.params, 0, model.tokenizer, SERVE)
    loop.start()
    try:
        prompt = bench.ids("abc")
        begun = time.monotonic()
        await loop.submit(prompt, SamplingParams(max_tokens=3, ignore_eos=True)).result()
        seconds = time.monotonic() - begun
    finally:
        loop.close()
    stats = loop.stats()
    assert 0.0 < stats["serve/decode_s"] <= seconds + 0.1
    contexts = [len(prompt), len(prompt) + 1, len(prompt) + 2]  # with the token that is read
    wanted = sum(bound.step_s + bound.token_s[None] * number for number in contexts)
    assert stats["serve/decode_bound_s"] == pytest.approx(wanted)


async def test_all_kinds_of_requests_are_answered_as_one_step_at_a_time(bench: Bench, fast):
    kinds = [SamplingParams(seed=n, max_tokens=3 + 3 * n, top_p=0.9) for n in range(5)]
    kinds += [SamplingParams(seed=9, max_tokens=9, top_logprobs=2, presence_penalty=0.5)]
    prompts = [bench.ids("several at once, " + "x" * n) for n in range(len(kinds))]

    async def answers(loop: EngineLoop) -> list[Completion]:
        return await asyncio.gather(
            *(loop.submit(ids, kind).result() for ids, kind in zip(prompts, kinds, strict=True))
        )

    for one, batched in zip(await answers(bench.loop), await answers(fast), strict=True):
        same(one, batched)


async def test_limits_and_end_tokens_waste_nothing(bench: Bench, model, fast):
    prompts = [bench.ids("ends " + "x" * n) for n in range(6)]
    kinds = [SamplingParams(seed=n, max_tokens=5 * AT_ONCE + n, ignore_eos=True) for n in range(6)]
    kinds[1] = replace(kinds[1], temperature=0.0)
    kinds[2] = replace(kinds[2], top_p=0.8, top_k=30)

    async def answers(loop: EngineLoop, *, ignore_eos: bool) -> list[Completion]:
        settings = [replace(kind, ignore_eos=ignore_eos) for kind in kinds]
        requests = zip(prompts, settings, strict=True)
        return list(await asyncio.gather(*(loop.submit(*one).result() for one in requests)))

    before = fast.stats()
    full = await answers(fast, ignore_eos=True)
    assert counted(fast, before)["tokens_past_end"] == 0
    assert [len(one.token_ids) for one in full] == [kind.max_tokens for kind in kinds]
    # Six requests in four slots end at different steps, and two begin between dispatches.
    eos_ids = {full[0].token_ids[6], full[2].token_ids[9], full[4].token_ids[AT_ONCE - 1]}
    with running(model, AT_ONCE, eos_ids) as several, running(model, 1, eos_ids) as single:
        results = [await answers(loop, ignore_eos=False) for loop in (several, single)]
        for ended, expected, whole in zip(*results, full, strict=True):
            same(ended, expected)
            assert ended.token_ids == whole.token_ids[: len(ended.token_ids)]
            has_ended = len(ended.token_ids) < len(whole.token_ids)
            assert ended.finish_reason == ("stop" if has_ended else "length")
        assert sum(len(one.token_ids) < AT_ONCE * 3 for one in results[0]) >= 3
        for loop in (several, single):
            stats = loop.stats()
            assert stats["serve/tokens_past_end"] == 0
            number = sum(len(one.token_ids) for one in results[0])
            assert stats["serve/tokens_generated"] == number


async def test_steps_in_one_dispatch_are_those_that_somebody_needs(fast, bench: Bench):
    before = fast.stats()
    greedy = SamplingParams(temperature=0.0, max_tokens=2 * AT_ONCE + 3)
    full = await fast.submit(bench.ids("abc"), greedy).result()
    assert len(full.token_ids) == 11 and full.finish_reason == "length"
    assert counted(fast, before) == {"steps": 11, "tokens_generated": 11, "tokens_past_end": 0}


@pytest.mark.parametrize("kind", ["plain", "stop", "many ends", "likeliest"])
async def test_ends_that_only_the_host_knows_make_single_steps(
    kind: str, bench: Bench, model, fast, monkeypatch: pytest.MonkeyPatch
):
    numbers: list[int] = []
    start = Stepper.start

    def starting(*args):
        state, steps = start(*args)
        numbers.extend([steps.number] if steps else [])
        return state, steps

    monkeypatch.setattr(Stepper, "start", starting)
    number = 3 * AT_ONCE
    sampling = SamplingParams(temperature=0.0, max_tokens=number)
    full = await bench.loop.submit(bench.ids("abc"), sampling).result()
    options = {"stop": {"stop": (full.text[4:6],)}, "likeliest": {"top_logprobs": 2}}
    other, eos_ids = replace(sampling, **options.get(kind, {})), ()
    if kind == "many ends":
        eos_ids = range(4 + len(set(full.token_ids)))
    with running(model, AT_ONCE, set(eos_ids) - set(full.token_ids)) as loop:
        numbers.clear()
        with loop._changed:  # both start in one turn
            results = [loop.submit(bench.ids("abc"), one) for one in (sampling, other)]
        first, second = [await one.result() for one in results]
    same(first, full)
    assert full.token_ids[: len(second.token_ids)] == second.token_ids
    assert (second.finish_reason == "stop") == (kind == "stop")
    assert loop.stats()["serve/tokens_past_end"] == (kind == "stop")
    if kind == "plain":
        assert set(numbers) == {AT_ONCE}
    elif kind != "stop":
        assert set(numbers) == {1}
    else:  # the other one goes on alone
        used = len(second.token_ids)
        assert set(numbers[:used]) == {1} and AT_ONCE in numbers[used:]


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


MIXED = [
    SamplingParams(seed=1, max_tokens=40, top_p=0.9),
    SamplingParams(seed=2, max_tokens=40, grammar=GRAMMAR),
    SamplingParams(seed=3, max_tokens=30, temperature=0.7, grammar=GRAMMAR, top_logprobs=3),
    SamplingParams(seed=4, max_tokens=30, grammar=GRAMMAR, logit_bias=((67, 5.0),), top_k=9),
    SamplingParams(seed=5, max_tokens=25, top_logprobs=5),
    SamplingParams(seed=6, max_tokens=25, logit_bias=((67, 3.0), (70, 4.0))),
    SamplingParams(seed=7, max_tokens=25, frequency_penalty=1.0, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=30, grammar="start: /[a-f]{25}/"),
    SamplingParams(seed=9, max_tokens=35),
]


async def test_a_mixed_batch_gives_each_request_what_it_gets_alone(bench: Bench, fast, model):
    prompts = [bench.ids("mixed " + "x" * (3 * n)) for n in range(len(MIXED))]
    alone = [
        await bench.loop.submit(ids, kind).result()
        for ids, kind in zip(prompts, MIXED, strict=True)
    ]
    # A stop string in the middle of a response, in a batch with masks.
    stop = replace(MIXED[0], stop=(alone[0].text[7:9],))
    kinds, asked = [*MIXED, stop], [*prompts, prompts[0]]
    alone.append(await bench.loop.submit(prompts[0], stop).result())
    assert alone[-1].finish_reason == "stop" and len(alone[-1].token_ids) < 40
    assert any(alone[1].forced) and not all(alone[1].forced)
    for loop in (bench.loop, fast):
        open_ = [loop.submit(ids, kind) for ids, kind in zip(asked, kinds, strict=True)]
        cancelled = loop.submit(prompts[1], MIXED[1])
        await anext(aiter(open_[1]))
        loop.load_weights(model.params, 1)  # the same weights, but the prefix cache is emptied
        async for _ in cancelled:
            cancelled.cancel()
        assert (await cancelled.result()).finish_reason == "cancelled"
        for generation, expected in zip(open_, alone, strict=True):
            result = await generation.result()
            same(result, expected)
            assert list(result.policy_versions) == sorted(result.policy_versions)


async def test_a_late_mask_holds_its_own_row_alone(bench: Bench, monkeypatch):
    prompt, plain = bench.ids("late"), SamplingParams(seed=1, max_tokens=30)
    expected = [await bench.loop.submit(prompt, kind).result() for kind in (MIXED[1], plain)]
    has_come, poll = threading.Event(), LogitAdjuster.poll

    def late(adjuster: LogitAdjuster) -> None:
        if has_come.is_set():
            poll(adjuster)

    monkeypatch.setattr(LogitAdjuster, "poll", late)
    constrained = bench.loop.submit(prompt, MIXED[1])
    for _ in range(2):
        same(await bench.loop.submit(prompt, plain).result(), expected[1])
    assert not constrained._started.is_set()
    has_come.set()
    same(await constrained.result(), expected[0])


async def test_steps_start_ahead_beside_a_constrained_request(bench: Bench, monkeypatch):
    started: list[Steps] = []
    ahead: list[bool] = []  # per step read: True if the next one had started
    start, read = Stepper.start, Stepper.read

    def starting(*args):
        state, steps = start(*args)
        started.extend([steps] if steps else [])
        return state, steps

    def reading(stepper: Stepper, steps: Steps) -> Iterator[tuple[Collection[Request], list[bool]]]:
        ahead.append(steps is not started[-1])
        return read(stepper, steps)

    monkeypatch.setattr(Stepper, "start", starting)
    monkeypatch.setattr(Stepper, "read", reading)
    number, kinds = 40, (SamplingParams(seed=1, max_tokens=40), MIXED[-2])
    with bench.loop._changed:  # both start in one turn
        open_ = [bench.loop.submit(bench.ids("ahead"), kind) for kind in kinds]
    _, constrained = [await generation.result() for generation in open_]
    taken = [[r.adjuster is None for r in steps.requests.values()] for steps in started]
    plain = [i for i, rows in enumerate(taken) if True in rows]
    masked = [i for i, rows in enumerate(taken) if False in rows]
    assert plain == list(range(number)) and all(ahead[: number - 1])
    assert len(masked) == len(constrained.token_ids)
    assert all(later - i > 1 for i, later in itertools.pairwise(masked) if later < number)
    assert bench.loop.stats()["serve/adjusted_steps"] == len(masked)
