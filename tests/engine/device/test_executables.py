"""Tests of compiling programs in the order of need."""

import math
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.engine.device.executables import (
    BUSY_SHARE,
    IDLE_SHARE,
    NUM_TIMED,
    Compiler,
    Costs,
    Executables,
    Size,
)


class Known(Costs):
    """A call takes as many seconds as its size has units."""

    def seconds(self, size: Size) -> float:
        return float(math.prod(size))


class Steps:
    """A program of several sizes, whose compilation can be held up."""

    def __init__(self) -> None:
        self.compiler, self.lowered = Compiler(), []
        self.go = threading.Event()
        costs = Known(fixed_share=0.0)
        self.executables = Executables("add", self._lower, self.compiler, costs)

    def _lower(self, size: tuple[int, ...], *shapes: Any) -> Any:
        self.lowered.append(size)
        if threading.current_thread().name == "compiler":
            self.go.wait(30)
        return jax.jit(lambda x: x + size[0] * 100 + size[1]).lower(*shapes)

    def wait_for(self, *size: int) -> None:
        self.go.set()
        while size not in self.executables.ready:
            time.sleep(0.01)

    def run(self, *size: int) -> int:
        x = np.float32(0)
        return int(self.executables.run(size, x))


@pytest.fixture
def steps():
    made = Steps()
    yield made
    made.go.set()
    made.compiler.close()


def test_the_first_call_compiles_its_size(steps: Steps) -> None:
    assert steps.run(1, 2) == 102
    assert steps.lowered == [(1, 2)]


def test_a_larger_program_runs_until_the_lost_time_pays_a_compilation(steps: Steps) -> None:
    assert steps.run(4, 4) == 404
    steps.executables._compile_s = 40.0 / BUSY_SHARE  # each call with (1, 2) loses 14 s
    assert [steps.run(1, 2) for _ in range(2)] == [404, 404]
    assert steps.run(1, 3) == 404  # counted by itself
    steps.compiler.close()
    assert steps.lowered == [(4, 4)]
    assert steps.run(1, 2) == 404
    steps.wait_for(1, 2)
    assert steps.run(1, 2) == 102 and steps.lowered == [(4, 4), (1, 2)]


def test_an_idle_engine_compiles_what_lost_most(steps: Steps) -> None:
    steps.run(4, 4)
    steps.executables._compile_s = 28.0 / IDLE_SHARE  # two calls with (1, 2)
    for size in ((1, 2), (1, 3), (1, 3)):  # 14 and 26 s are lost
        steps.run(*size)
    assert not steps.executables.request_while_idle()
    steps.run(1, 2)
    assert steps.executables.request_while_idle()
    steps.wait_for(1, 2)
    steps.compiler.close()
    steps.executables._compile_s = 30.0 / IDLE_SHARE
    assert not steps.executables.request_while_idle() and steps.lowered == [(4, 4), (1, 2)]


def test_lost_time_requests_a_program_that_nothing_replaces(steps: Steps) -> None:
    x = np.float32(0)
    steps.executables._compile_s = 2.0 / BUSY_SHARE
    steps.executables.lose((1, 1), 1.5, x)
    steps.executables.lose((1, 1), -1.0, x)  # nothing is gained by a program that lacks
    steps.compiler.close()
    assert not steps.lowered
    steps.executables.lose((1, 1), 0.5, x)
    steps.wait_for(1, 1)
    assert steps.lowered == [(1, 1)] and steps.executables.waited_s == 0.0  # nobody waited


def test_the_first_calls_of_a_size_are_timed() -> None:
    compiler, costs = Compiler(), Costs(fixed_share=0.5)
    times: list[float] = []
    costs.add = lambda size, seconds: times.append(seconds)  # type: ignore[method-assign]
    slow = Executables("slow", lambda size, *shapes: jax.jit(_slow).lower(*shapes), compiler, costs)
    for _ in range(NUM_TIMED + 2):
        slow.run((1,), np.float32(0))
    assert len(times) == NUM_TIMED and min(times) >= 0.02


def _slow(x: Any) -> Any:
    def wait(x: Any) -> Any:
        time.sleep(0.02)
        return x

    return jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), x)


def test_sizes_that_never_ran_cost_what_the_others_say() -> None:
    costs = Costs(fixed_share=0.25)
    assert costs.seconds((4,)) is None
    costs.add((4,), 9.0)
    costs.add((4,), 8.0)
    costs.add((4,), 12.0)  # had to wait
    assert costs.seconds((4,)) == 8.0
    assert costs.seconds((12,)) == pytest.approx(2.0 + 6.0 * 3)  # 2 s fixed
    costs.add((8,), 10.0)
    assert costs.seconds((2,)) == pytest.approx(7.0)  # 6 s, and half a second for each unit
    assert costs.seconds((16,)) == pytest.approx(14.0)
    costs.add((16,), 1.0)  # measured sizes are as measured, and no line falls
    assert costs.seconds((16,)) == 1.0 and costs.seconds((32,)) == pytest.approx(19.0 / 3)


def test_the_smallest_larger_program_is_taken_and_never_a_smaller_one(steps: Steps) -> None:
    for size in ((2, 1), (1, 4), (4, 4), (2, 4)):
        steps.executables.compile(size, np.float32(0))
    assert steps.run(2, 2) == 204
    assert steps.run(5, 1) == 501


def test_a_call_waits_for_the_thread_that_compiles_its_size(steps: Steps) -> None:
    steps.executables.request((1, 1), np.float32(0))
    threading.Timer(0.5, steps.go.set).start()
    assert steps.run(1, 1) == 101
    assert steps.lowered == [(1, 1)]
    waited_s = steps.executables.waited_s
    assert waited_s > 0  # the compilation is not the fault of a response
    assert steps.run(1, 1) == 101 and steps.executables.waited_s == waited_s


def test_only_programs_that_are_ready_and_large_enough_count_as_there(steps: Steps) -> None:
    executables, x = steps.executables, jnp.ones(2)
    executables.request((2, 8), x)
    assert not executables.has((1, 1))
    steps.wait_for(2, 8)
    assert [executables.has(size) for size in ((2, 8), (1, 4), (3, 1), (1, 9))] == [
        *(True, True, False, False)
    ]


def test_a_call_waits_for_a_larger_program_that_was_requested(steps: Steps) -> None:
    for size in ((4, 4), (2, 2)):
        steps.executables.request(size, np.float32(0))
    while not steps.lowered:
        time.sleep(0.01)
    assert steps.run(1, 2) == 202
    threading.Timer(0.1, steps.go.set).start()
    assert steps.run(3, 1) == 404
    assert sorted(steps.lowered) == [(2, 2), (4, 4)]


def test_closing_drops_what_waits(steps: Steps) -> None:
    for size in ((1, 1), (2, 2), (3, 3)):
        steps.executables.request(size, np.float32(0))
    while not steps.lowered:
        time.sleep(0.01)
    assert steps.executables.num_compiling == 1
    threading.Timer(0.1, steps.go.set).start()
    steps.compiler.close()
    assert steps.executables.num_compiling == 0
    assert steps.executables.ready == {(1, 1)} and steps.lowered == [(1, 1)]
    assert steps.run(3, 3) == 303  # compiled by the call


def test_an_error_reaches_the_call_that_needs_the_program(steps: Steps) -> None:
    def fails(size: tuple[int, ...], *shapes: Any) -> Any:
        raise RuntimeError("no memory")

    broken = Executables("broken", fails, steps.compiler, steps.executables.costs)
    broken.request((1,), np.float32(0))
    with pytest.raises(RuntimeError):
        broken.run((1,), np.float32(0))


def test_requests_keep_no_buffers(steps: Steps) -> None:
    x = jnp.zeros(3)
    steps.executables.request((1, 1), x)
    x.delete()
    steps.wait_for(1, 1)
