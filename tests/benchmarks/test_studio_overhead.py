"""Tests of the arithmetic of benchmarks/studio_overhead.py."""

import pytest
from studio_overhead import WARM_UP, is_open, ratios


def test_trend_over_the_steps_cancels() -> None:
    seconds = [100.0] * WARM_UP + [10.0 + step for step in range(8)]
    assert [is_open(WARM_UP + step) for step in range(4)] == [False, True, True, False]
    found = ratios(seconds)
    assert len(found) == 4
    assert sum(found) / 4 == pytest.approx(1.0, abs=0.01)


def test_slower_steps_with_pages_are_seen() -> None:
    seconds = [2.0 if is_open(step) else 1.0 for step in range(WARM_UP + 9)]
    assert ratios(seconds) == [2.0] * 4  # the last step has no neighbor
