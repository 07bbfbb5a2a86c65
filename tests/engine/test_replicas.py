"""Tests of engine replicas on separate devices: routing, and equal results."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lightning_jax.engine import replicas
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import SWITCH_S, Engine
from lightning_jax.engine.generation import EngineError
from lightning_jax.engine.replicas import BLOCK, Router, split_by_data
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.testing.tiny import tiny_model

SERVE = ServeConfig(slots=4, max_len=128, prefill_buckets=(128,))
MODEL = tiny_model(0, num_layers=1)


def make(config: MeshConfig) -> Engine:
    return Engine(MODEL, SERVE, mesh=make_mesh(config))


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """Yield an engine with three replicas and one with a single replica.

    Each has one device, because XLA's CPU compiler may deadlock if several programs communicate
    between simulated devices at once.
    """
    made = make(MeshConfig(data=3, fsdp=1)), make(MeshConfig(data=1, fsdp=1))
    for engine in made:
        engine.start()
    yield made
    for engine in made:
        engine.close()


def prompts(number: int, length: int = 100) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(number)
    return [tuple(rng.integers(0, 256, length).tolist()) for _ in range(number)]


def ask(loop: Any, asked: list[tuple[int, ...]]) -> list[Completion]:
    async def all_at_once() -> list[Completion]:
        samplings = [SamplingParams(max_tokens=8, seed=seed) for seed in range(len(asked))]
        pairs = zip(asked, samplings, strict=True)
        generations = [loop.submit(prompt, sampling) for prompt, sampling in pairs]
        return [await generation.result() for generation in generations]

    return asyncio.run(all_at_once())


def test_each_copy_has_devices_of_its_own() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    parts = split_by_data(mesh)
    assert [part.shape for part in parts] == [{"data": 1, "fsdp": 2, "expert": 1, "tensor": 2}] * 2
    assert [device for part in parts for device in part.devices.flat] == list(mesh.devices.flat)
    assert split_by_data(parts[0]) == parts[:1]


def test_of_several_processes_the_mesh_serves_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas.jax, "process_count", lambda: 2)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert split_by_data(mesh) == [mesh]


def test_copies_answer_as_one_engine_does(engines: tuple[Engine, Engine]) -> None:
    copies, single = engines
    asked = prompts(9) + prompts(3) * 2
    ours, theirs = ask(copies, asked), ask(single, asked)
    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.behavior_logprobs, other.behavior_logprobs, atol=1e-5)
    stats = copies.stats()
    assert stats["serve/requests"] == 15.0
    counts = [loop.stats()["serve/requests"] for loop in copies._loops]
    assert sum(counts) == 15 and min(counts) >= 3
    assert copies.num_open == 0 and stats["serve/prefix_hit_tokens"] > 0


def test_new_weights_reach_every_copy(engines: tuple[Engine, Engine]) -> None:
    copies, single = engines
    other = tiny_model(1, num_layers=1).params
    asked = prompts(6, 20)
    before = ask(copies, asked)
    for engine in engines:
        engine.publish(other)
        assert engine.version == 1
    ours, theirs = ask(copies, asked), ask(single, asked)
    for old, mine, wanted in zip(before, ours, theirs, strict=True):
        assert mine.policy_versions == (1,) * 8 and mine.token_ids == wanted.token_ids
        assert mine.behavior_logprobs != pytest.approx(old.behavior_logprobs, abs=1e-3)
    with pytest.raises(InvalidValue) as caught:
        copies.publish(other, 1)
    assert (caught.value.key, caught.value.reason) == ("version", "out_of_range")


def test_a_copy_that_fails_shows_and_all_can_be_closed() -> None:
    copies = make(MeshConfig(data=2, fsdp=1))
    assert copies.status == "ok"
    for replica in copies._loops:
        replica.start()
    copies._loops[1].close()
    assert copies.status == "failed"
    for first in range(3):  # the healthy one answers
        assert len(ask(copies, [(first, 2)])) == 1
    copies.close()
    with pytest.raises(EngineError) as caught:
        ask(copies, [(1, 2)])
    assert caught.value.reason == "closed"


@dataclass(frozen=True)
class _Device:
    platform: str


@pytest.mark.parametrize(("platform", "switch_s"), [("cpu", 0.005), ("gpu", SWITCH_S)])
def test_threads_take_short_turns_where_an_accelerator_serves(
    platform: str, switch_s: float
) -> None:
    before = sys.getswitchinterval()
    engine = make(MeshConfig(fsdp=1))
    engine.devices = {_Device(platform)}
    try:
        engine.start()
        assert sys.getswitchinterval() == pytest.approx(switch_s)
    finally:
        sys.setswitchinterval(before)
        engine.close()


def test_warming_up_compiles_what_serving_needs() -> None:
    copies = make(MeshConfig(data=2, fsdp=1))
    copies.warmup()
    compiles = copies.stats()["serve/compiles"]
    copies.start()
    ask(copies, prompts(6) + prompts(2, 10))
    asyncio.run(copies.drain())
    assert copies.status == "draining" and copies.stats()["serve/compiles"] == compiles
    copies.close()


def test_a_prompt_goes_where_its_beginning_was_read() -> None:
    router, (first, second) = Router(2, slots=8), prompts(2, 3 * BLOCK)
    assert router.select(first, [0, 0]) == 0 and router.select(second, [1, 0]) == 1
    assert router.select(first, [2, 1]) == 0  # though its load is higher
    assert router.select((*second, *range(40)), [0, 1]) == 1
    assert router.select(first, [4, 1]) == 1  # 8 slots: at most 2 more requests
    assert router.select(first, [0, 2]) == 1  # which now has it, too
    assert router.select(first[:BLOCK], [3, 1]) == 1


def test_a_short_common_beginning_binds_nobody() -> None:
    router, (shared, *tails) = Router(3, slots=8), prompts(5, 2 * BLOCK)
    chosen = [
        router.select((*shared[:BLOCK], *tail), loads)
        for tail, loads in zip(tails, ([0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]), strict=True)
    ]
    assert chosen == [0, 1, 2, 0]
    assert router.select((), [1, 0, 1]) == 1 and router.select((1,) * (BLOCK - 1), [2, 2, 1]) == 2


def test_what_was_read_long_ago_or_with_other_weights_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "MOST_BLOCKS", 4)
    router, (first, second, third) = Router(2, slots=8), prompts(3, 2 * BLOCK)
    assert [router.select(first, [0, 0]), router.select(second, [0, 1])] == [0, 0]
    router.select(first, [1, 0])  # used again, so it is kept
    router.select(third, [0, 1])
    assert router.select(first, [1, 0]) == 0 and router.select(second, [1, 0]) == 1
    router.forget()
    assert router.select(first, [1, 0]) == 1
