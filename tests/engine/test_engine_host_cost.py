"""Counts of the Python calls that the engine's thread makes per decode step.

They stand for its CPU time, which `benchmarks/host_cost.py` measures, and are the same on every
machine. Each item of a generator is a call, too.
"""

import asyncio
import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_jax
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.response import TimeLimit
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.system.clock import PausableClock

PACKAGE = str(Path(lightning_jax.__file__).parent)
FEW, MANY, NUM_TOKENS = 8, 32, 20  # slots in use, and tokens of each response
SERVE = ServeConfig(slots=MANY, max_len=32, prefill_buckets=(8,), prefix_cache_mib=0.0)


class CallCounter:
    """Number of calls of this package's functions on the engine's thread, by decode step."""

    def __init__(self) -> None:
        self.steps = [0]

    def begin(self, *_: Any) -> None:
        """Begin to count if the engine's thread has just started."""
        is_engine = threading.current_thread().name == "engine"
        sys.setprofile(self.count if is_engine else None)

    def count(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.steps[-1] += 1
            if (Path(code.co_filename).name, code.co_name) == ("decode.py", "start"):
                self.steps.append(0)


@pytest.fixture(scope="module")
def counted(model: LoadedModel) -> Iterator[tuple[EngineLoop, CallCounter]]:
    programs, counter = SlotPrograms(model.config, SERVE), CallCounter()
    loop = EngineLoop(programs, model.params, 0, model.tokenizer, SERVE)
    threading.setprofile(counter.begin)
    loop.start()
    threading.setprofile(None)  # type: ignore[arg-type]
    yield loop, counter
    loop.close()


async def calls_per_step(counted: tuple[EngineLoop, CallCounter], slots: int) -> float:
    """Return the calls for a usual step of so many slots, in which no response begins or ends."""
    loop, counter = counted
    sampling, clock = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True), PausableClock()
    counter.steps = [0]
    with loop._changed:  # all start in one turn
        open_ = [
            loop.submit([row, 3], sampling, time_limit=TimeLimit(600.0, clock.now_s))
            for row in range(slots)
        ]
    await asyncio.gather(*(generation.result() for generation in open_))
    assert len(counter.steps) > NUM_TOKENS
    return statistics.median(counter.steps)


async def test_a_step_makes_few_calls_for_a_slot(
    counted: tuple[EngineLoop, CallCounter],
) -> None:
    many, few = [await calls_per_step(counted, slots) for slots in (MANY, FEW)]
    for_a_slot = (many - few) / (MANY - FEW)
    assert for_a_slot <= 8  # 7.4; 32 while each token was decoded as it came
    assert few - FEW * for_a_slot <= 90  # 76
