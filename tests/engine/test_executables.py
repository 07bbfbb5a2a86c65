"""Tests of compiling programs in the order of need."""

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.engine.executables import CALLS_TO_PAY_BACK, Compiler, Executables


class Steps:
    """A program of several sizes, whose compilation can be held up."""

    def __init__(self) -> None:
        self.compiler, self.lowered = Compiler(), []
        self.go = threading.Event()
        self.executables = Executables("add", self._lower, self.compiler)

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
        return int(self.executables.at_least(size, x)(x))


@pytest.fixture
def steps():
    made = Steps()
    yield made
    made.go.set()
    made.compiler.close()


def test_the_first_call_compiles_its_size(steps: Steps) -> None:
    assert steps.run(1, 2) == 102
    assert steps.lowered == [(1, 2)]


def test_a_larger_program_runs_until_the_exact_one_pays_back(steps: Steps) -> None:
    assert steps.run(4, 4) == 404
    for _ in range(CALLS_TO_PAY_BACK - 1):
        assert steps.run(1, 2) == 404
    assert steps.run(1, 3) == 404  # counted by itself
    steps.compiler.close()
    assert steps.lowered == [(4, 4)]
    assert steps.run(1, 2) == 404
    steps.wait_for(1, 2)
    assert steps.run(1, 2) == 102 and steps.lowered == [(4, 4), (1, 2)]


def test_counted_calls_request_a_program_that_nothing_replaces(steps: Steps) -> None:
    x = np.float32(0)
    steps.executables.count_call((1, 1), x, calls=CALLS_TO_PAY_BACK - 1)
    steps.compiler.close()
    assert not steps.lowered
    steps.executables.count_call((1, 1), x)
    steps.wait_for(1, 1)
    assert steps.lowered == [(1, 1)] and steps.executables.waited_s == 0.0  # nobody waited


def test_the_smallest_larger_program_is_taken_and_never_a_smaller_one(steps: Steps) -> None:
    for size in ((2, 1), (1, 4), (4, 4), (2, 4)):
        steps.executables.exactly(size, np.float32(0))
    assert steps.run(2, 2) == 204
    assert steps.run(5, 1) == 501


def test_a_call_waits_for_the_thread_that_compiles_its_size(steps: Steps) -> None:
    steps.executables.request((1, 1), np.float32(0))
    threading.Timer(0.1, steps.go.set).start()
    assert steps.run(1, 1) == 101
    assert steps.lowered == [(1, 1)]
    waited_s = steps.executables.waited_s
    assert waited_s >= 0.05  # the compilation is not the fault of a response
    assert steps.run(1, 1) == 101 and steps.executables.waited_s == waited_s


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

    broken = Executables("broken", fails, steps.compiler)
    broken.request((1,), np.float32(0))
    with pytest.raises(RuntimeError):
        broken.at_least((1,), np.float32(0))


def test_requests_keep_no_buffers(steps: Steps) -> None:
    x = jnp.zeros(3)
    steps.executables.request((1, 1), x)
    x.delete()
    steps.wait_for(1, 1)
