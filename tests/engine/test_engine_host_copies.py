"""Counts of the arrays that the engine hands to its programs and reads back.

On an accelerator each of them is a copy of its own between host and device. The bars are those of
one packed array in and one out. A program that this file does not name counts as an admission's.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.executables import Executables
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.formats.load import LoadedModel

NUM_TOKENS = 12  # of each response
SERVE = ServeConfig(slots=16, max_len=96, prefill_buckets=(8,))


class Counted:
    """Function that counts the arrays of the host among its arguments, under its name."""

    def __init__(self, name: str, function: Any, counts: Counter[str]) -> None:
        self._name, self._function, self._counts = name, function, counts

    def __call__(self, *arguments: Any) -> Any:
        self._counts[self._name] += num_host_arrays(arguments)
        return self._function(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def num_host_arrays(tree: Any) -> int:
    return sum(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))


@dataclass
class Traffic:
    """Arrays between host and device for a batch of requests that find their prefix cached."""

    handed_in: Counter[str] = field(default_factory=Counter)  # by program
    num_read: int = 0
    num_steps: int = 0

    @property
    def per_step(self) -> float:
        return self._of_steps() / self.num_steps

    @property
    def per_admission(self) -> float:
        return (self.handed_in.total() - self._of_steps()) / SERVE.slots

    def _of_steps(self) -> int:
        return sum(number for name, number in self.handed_in.items() if "generate" in name)


@pytest.fixture(scope="module")
def loop(model: LoadedModel) -> Iterator[EngineLoop]:
    """Start an engine that can prefill prompts of all slots at once."""
    engine = SlotPrograms(model.config, SERVE)
    params, cache = engine.put_on_mesh(model.params), engine.init_state().cache
    for count in engine._chunks_at_once[SERVE.prefill_buckets[0]]:
        size = (SERVE.prefill_buckets[0], count)
        engine._prefill.compile(size, params, cache, engine._prompts(*size))
    loop = EngineLoop(engine, model.params, 0, model.tokenizer, SERVE)
    loop.start()
    yield loop
    loop.close()


@pytest.fixture
async def traffic(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    async def answer(first: int) -> None:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        prompts = [[*range(100, 140), first + row, 3] for row in range(SERVE.slots)]
        await asyncio.gather(*(loop.submit(ids, sampling).result() for ids in prompts))

    await answer(10)  # caches the shared prefix
    counted = Traffic()
    run, get = Executables._timed, jax.device_get

    def timed(self: Executables, size: Any, arguments: Any) -> Any:
        counted.handed_in[self._name] += num_host_arrays(arguments)
        return run(self, size, arguments)

    def device_get(tree: Any) -> Any:
        counted.num_read += len(jax.tree.leaves(tree))
        return get(tree)

    monkeypatch.setattr(Executables, "_timed", timed)
    monkeypatch.setattr(jax, "device_get", device_get)
    for owner in (loop._programs, loop._programs.pages):
        for name, value in list(vars(owner).items()):
            if callable(value) and hasattr(value, "lower"):  # a jitted function
                monkeypatch.setattr(owner, name, Counted(name, value, counted.handed_in))
    before = loop.stats()["serve/steps"]
    await answer(20)
    counted.num_steps = int(loop.stats()["serve/steps"] - before)
    assert counted.num_steps >= NUM_TOKENS
    return counted


def test_step_takes_one_array(traffic: Traffic) -> None:
    assert traffic.per_step == 1


def test_admission_takes_at_most_one_array(traffic: Traffic) -> None:
    assert traffic.per_admission <= 1


def test_step_reads_one_array(traffic: Traffic) -> None:
    assert traffic.num_read == traffic.num_steps
