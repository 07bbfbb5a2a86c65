"""Clocks for programs on a device."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def seconds_a_run(run: Callable[[], Any], repeats: int, at_once: int = 8) -> float:
    """Return the median seconds of a run when several are dispatched before the wait."""
    import jax

    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready([run() for _ in range(at_once)])
        times.append((time.perf_counter() - started) / at_once)
    return statistics.median(times)


def median_s(run: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of `run`, which waits for its results, after one run to compile."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
