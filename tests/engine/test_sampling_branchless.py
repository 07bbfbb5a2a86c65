"""Tests that programs without branches, as accelerators have, sample what a CPU's programs do."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_bench import GRAMMAR, SERVE, Bench, same

from lightning_jax.engine.device import slots
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.device.table import SlotTable
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.sampling import Adjustment, Work, sample
from lightning_jax.engine.types import SamplingParams

ROWS, VOCAB = 4, 600
STEPS = 4


def sampling_inputs(top_p: float, top_k: int, min_p: float, temperature: list[float]) -> tuple:
    logits = 3 * jax.random.normal(jax.random.key(0), (ROWS, VOCAB))
    # The first row has no filter beside others that have.
    filters = [jnp.full(ROWS, value).at[0].set(off) for value, off in ((top_p, 1.0), (min_p, 0.0))]
    ints = jnp.full(ROWS, top_k, jnp.int32).at[0].set(0)
    keys = jax.random.split(jax.random.key(1), ROWS)
    return logits, keys, jnp.array(temperature), filters[0], ints, filters[1]


@pytest.mark.parametrize(
    ("filters", "temperature"),
    [
        (None, [1.0, 0.0, 0.7, 1.3]),
        (None, [0.0] * 4),
        ((1.0, 0, 0.0), [1.0] * 4),
        ((0.8, 0, 0.0), [1.0] * 4),
        ((1.0, 7, 0.0), [1.0, 0.0, 0.7, 1.3]),
        ((1.0, 0, 0.05), [1.0] * 4),
        ((0.6, 40, 0.01), [1.0, 0.0, 0.7, 1.3]),
    ],
)
def test_sampled_tokens_are_the_same(
    filters: tuple[float, int, float] | None, temperature: list[float]
) -> None:
    work = Work(filters=filters is not None)
    inputs = sampling_inputs(*filters or (1.0, 0, 0.0), temperature)
    expected = jax.jit(sample)(*inputs)
    sampled = jax.jit(lambda *arrays: sample(*arrays, work=work))(*inputs)
    np.testing.assert_array_equal(sampled.tokens, expected.tokens)
    for name in ("behavior_logprobs", "sampling_logprobs", "tempered_logprobs"):
        np.testing.assert_allclose(getattr(sampled, name), getattr(expected, name), atol=2e-6)


@pytest.mark.parametrize("work", [Work(filters=True), Work(filters=True, likeliest=True)])
def test_adjusted_samples_are_the_same(work: Work) -> None:
    inputs = sampling_inputs(0.8, 0, 0.0, [1.0, 0.0, 0.7, 1.3])
    allowed = np.random.default_rng(0).integers(0, 256, (ROWS, VOCAB // 8), np.uint8)
    bias = jnp.zeros((ROWS, VOCAB)).at[:, 3].set(5.0)
    adjustment = Adjustment(allowed, np.bool_(work.likeliest), bias)
    expected = jax.jit(sample)(*inputs, adjustment)
    sampled = jax.jit(lambda *arrays: sample(*arrays, work=work))(*inputs, adjustment)
    np.testing.assert_array_equal(sampled.tokens, expected.tokens)
    np.testing.assert_allclose(sampled.sampling_logprobs, expected.sampling_logprobs, atol=2e-6)
    if not work.likeliest:
        assert sampled.likeliest is None
        return
    np.testing.assert_array_equal(sampled.likeliest.ids, expected.likeliest.ids)


def test_nothing_waits_for_the_host() -> None:
    inputs = sampling_inputs(0.8, 7, 0.05, [1.0] * 4)

    def count(work: Work | None, word: str) -> int:
        program = jax.jit(lambda *arrays: sample(*arrays, work=work))
        return program.lower(*inputs).as_text().count(f"stablehlo.{word}")

    for work in (Work(), Work(filters=True)):
        assert count(work, "case") == count(work, "if") == 0
        # A CPU's random numbers have loops of their own.
        assert count(work, "while") == count(None, "while") - 2
    assert count(None, "case") == 3


@pytest.fixture(scope="module")
def accelerated(model) -> Iterator[EngineLoop]:
    """Engine on the CPU with the programs of an accelerator."""
    serve = replace(SERVE, steps_per_dispatch=STEPS, prefix_cache_mib=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "platform_of", lambda _: "gpu")
        programs = SlotPrograms(model.config, serve)
        params, state = programs.put_on_mesh(model.params), programs.init_state()
        arguments = (programs._per_step(params), state, SlotTable(SERVE.slots).next_steps(()))
        for steps in (programs._generate_steps, programs._steps_filtered):
            steps.compile((1, SERVE.slots), *arguments)
    loop = EngineLoop(programs, model.params, 0, model.tokenizer, serve)
    loop.start()
    yield loop
    loop.close()


async def test_all_kinds_of_requests_get_the_same_tokens(
    bench: Bench, accelerated: EngineLoop
) -> None:
    plain = [SamplingParams(seed=n, max_tokens=4 + n, temperature=n / 2) for n in range(3)]
    filtered = [
        SamplingParams(seed=4, max_tokens=9, top_p=0.7),
        SamplingParams(seed=5, max_tokens=5, top_k=3, temperature=0.8),
        SamplingParams(seed=6, max_tokens=6, min_p=0.1),
    ]
    likeliest = [SamplingParams(seed=7, max_tokens=6, top_logprobs=3, top_p=0.9)]
    masked = [SamplingParams(seed=9, max_tokens=6, grammar=GRAMMAR)]
    biased = [SamplingParams(seed=8, max_tokens=6, top_logprobs=2, logit_bias=((40, 5.0),))]
    programs = accelerated._programs
    for kinds in (plain, masked, filtered, likeliest, biased):
        prompts = [bench.ids("the same tokens, " + "x" * n) for n in range(len(kinds))]
        requests = list(zip(prompts, kinds, strict=True))
        expected = await asyncio.gather(*(bench.loop.submit(*one).result() for one in requests))
        answers = await asyncio.gather(*(accelerated.submit(*one).result() for one in requests))
        for answer, other in zip(answers, expected, strict=True):
            same(answer, other)
        assert bool(programs._generate_filtered.ready) == (kinds not in (plain, masked))
    assert programs._generate.ready and programs._steps_filtered.ready
    assert programs._generate_full.ready and programs._generate_biased.ready
