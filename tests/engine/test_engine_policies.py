"""Tests of policies behind one engine: only a policy's own weights answer its requests."""

import asyncio
from collections.abc import Iterator

import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.policies import Policy
from lightning_jax.testing.tiny import tiny_model

SERVE = ServeConfig(slots=2, max_len=64, prefill_buckets=(32,))
MODELS = [tiny_model(seed, num_layers=1) for seed in range(3)]
PROMPT = tuple(range(40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
FIXED = Policy("initial", 2)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Yield an engine of two policies and of fixed weights, which do not count."""
    programs = [SlotPrograms(MODELS[0].config, SERVE)]
    engine, second, fixed = [Engine(model, SERVE, programs=programs) for model in MODELS]
    engine.add(second)
    engine.add(fixed, are_counted=False)
    engine.start()
    yield engine
    engine.close()


def ask(engine: Engine, *policies: Policy) -> list[Completion]:
    async def ask_all() -> list[Completion]:
        return [await engine.submit(PROMPT, GREEDY, policy).result() for policy in policies]

    return asyncio.run(ask_all())


def test_neither_policy_reads_what_the_other_computed(engine: Engine) -> None:
    """Both have the prompt in their prefix cache when it is sent again."""
    first, second, *again = ask(engine, *[Policy("a"), Policy("b", 1)] * 2)
    assert first.behavior_logprobs != pytest.approx(second.behavior_logprobs, abs=1e-3)
    for before, after in zip((first, second), again, strict=True):
        assert after.token_ids == before.token_ids
        assert after.behavior_logprobs == pytest.approx(before.behavior_logprobs, abs=1e-5)
    counters = engine.stats()
    assert counters["serve/requests"] == 4.0 and counters["serve/prefix_hit_tokens"] > 0.0
    (fixed,) = ask(engine, FIXED)
    assert fixed.behavior_logprobs != pytest.approx(first.behavior_logprobs, abs=1e-3)
    # Fixed weights are not counted, and what all weights share is counted once.
    after, alone = engine.stats(), engine._weights[0].stats()
    assert after["serve/requests"] == 4.0 and after["serve/compiles"] == alone["serve/compiles"]
    assert engine.num_slots == 2 * SERVE.slots


def test_new_weights_replace_those_of_one_policy(engine: Engine) -> None:
    first, fixed = ask(engine, Policy(), FIXED)
    engine.publish(MODELS[2].params, 5, 1)
    engine.publish(None, 5)
    one, two, same = ask(engine, Policy(), Policy(weights=1), FIXED)
    versions = [set(answer.policy_versions) for answer in (one, two, same)]
    assert versions == [{5}, {5}, {0}] and engine.version == 5
    assert one.behavior_logprobs == pytest.approx(first.behavior_logprobs, abs=1e-5)
    for answer in (two, same):
        assert answer.behavior_logprobs == pytest.approx(fixed.behavior_logprobs, abs=1e-5)


def test_weights_that_are_not_there_and_a_loop_that_failed(engine: Engine) -> None:
    with pytest.raises(InvalidValue) as caught:
        engine.submit(PROMPT, GREEDY, Policy(weights=3))
    assert (caught.value.key, caught.value.reason) == ("policy", "unknown")
    assert engine.status == "ok"
    engine.close()
    assert engine.status == "failed"
