"""Counts of the arrays that the engine hands to its programs and reads back.

On an accelerator each of them is a copy of its own between host and device. The bars are those of
one packed array in and one out. A program that this file does not name counts as an admission's.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
import pytest
from engine_bench import SERVE, Bench

from lightning_jax.engine.device.executables import Executables
from lightning_jax.engine.types import SamplingParams

NUM_TOKENS = 12  # of each response


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


@pytest.fixture
async def traffic(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    async def answer(first: int) -> None:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        prompts = [[*range(100, 140), first + row, 3] for row in range(SERVE.slots)]
        await asyncio.gather(*(bench.loop.submit(ids, sampling).result() for ids in prompts))

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
    for owner in (bench.engine, bench.engine.pages):
        for name, value in list(vars(owner).items()):
            if callable(value) and hasattr(value, "lower"):  # a jitted function
                monkeypatch.setattr(owner, name, Counted(name, value, counted.handed_in))
    before = bench.loop.stats()["serve/steps"]
    await answer(20)
    counted.num_steps = int(bench.loop.stats()["serve/steps"] - before)
    assert counted.num_steps >= NUM_TOKENS
    return counted


def test_step_takes_one_array(traffic: Traffic) -> None:
    assert traffic.per_step == 1


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="17 to 29 arrays today")
def test_admission_takes_at_most_one_array(traffic: Traffic) -> None:
    assert traffic.per_admission <= 1


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="4 arrays today")
def test_step_reads_one_array(traffic: Traffic) -> None:
    assert traffic.num_read == traffic.num_steps


def test_copies_are_no_more_than_before(traffic: Traffic) -> None:
    # 8 to activate, 4 each to restore and to prefill, 1 to retire, and 4 for each page stored, of
    # which a request stores up to 3.
    assert traffic.per_admission <= 29
    assert traffic.num_read <= 4 * traffic.num_steps
