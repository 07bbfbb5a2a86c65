"""Counts of an update's gradient, as JAX lowers it for a GPU that is not here.

Left out of `make test`: python -m pytest -m gpu_compiler, as docs/gpu_cluster.md says.
"""

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
from gpu_programs import UpdateCounts, count_update, lower_update

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of tokamax's imports
]
NAMES = [one.name for one in fields(UpdateCounts)]

# Attention's kernels: one forward, two backward. If its output were not kept, it would be four.
BARS = UpdateCounts(wide_products=0, branches=0, kernels_per_layer=3)

counts_of = functools.cache(count_update)


@pytest.mark.parametrize("model", ["135m", "1.5b", "8b"])  # 8b trains adapters
@pytest.mark.parametrize("name", NAMES)
def test_count_is_within_its_bar(model: str, name: str, h100: Sequence[Any]) -> None:
    assert getattr(counts_of(model, h100), name) <= getattr(BARS, name)


def test_attention_is_tokamax_where_it_is_installed(h100: Sequence[Any]) -> None:
    text, _ = lower_update("135m", h100)
    calls = [name in text for name in ("@mosaic_gpu_v2(", "@__gpu$xla.gpu.triton(")]
    is_installed = importlib.util.find_spec("tokamax") is not None
    assert calls == [is_installed, not is_installed]
