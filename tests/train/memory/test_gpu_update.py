"""Counts of an update's gradient, as JAX lowers it for a GPU that is not here.

Left out of `make test`: python -m pytest -m gpu_compiler, as docs/gpu_cluster.md says.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import pytest
from gpu_programs import UpdateCounts, count_update

pytestmark = pytest.mark.gpu_compiler
NAMES = [one.name for one in fields(UpdateCounts)]

# Attention's kernels: one forward, two backward. With recomputation it is four.
BARS = UpdateCounts(wide_products=0, branches=0, kernels_per_layer=3)
TODAY = {
    "135m": UpdateCounts(wide_products=2, branches=2, kernels_per_layer=4),
    "1.5b": UpdateCounts(wide_products=2, branches=2, kernels_per_layer=4),
    "8b": UpdateCounts(wide_products=1, branches=2, kernels_per_layer=4),  # adapters
}


def cases() -> Iterator[Any]:
    """Yield each figure of each model. Those above their bar are expected to fail."""
    for model, today in TODAY.items():
        for name in NAMES:
            figure, bar = getattr(today, name), getattr(BARS, name)
            reason = f"{figure} today, the bar is {bar}"
            fails = pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)
            yield pytest.param(model, name, marks=[fails] if figure > bar else [])


counts_of = functools.cache(count_update)


@pytest.mark.parametrize(("model", "name"), list(cases()))
def test_count_is_within_its_bar(model: str, name: str, h100: Sequence[Any]) -> None:
    assert getattr(counts_of(model, h100), name) <= getattr(BARS, name)


@pytest.mark.parametrize("model", TODAY)
def test_counts_are_no_more_than_before(model: str, h100: Sequence[Any]) -> None:
    counts, today = counts_of(model, h100), TODAY[model]
    grown = {name for name in NAMES if getattr(counts, name) > getattr(today, name)}
    assert not grown, (counts, today)
