"""Fixture that makes dtype promotion strict for tests of our own numerics."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make promotion strict unless a module sets `STRICT_PROMOTION = False` for optax's AdamW."""
    if not getattr(request.module, "STRICT_PROMOTION", True):
        yield
        return
    with jax.numpy_dtype_promotion("strict"):
        yield
