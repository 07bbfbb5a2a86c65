"""Strict dtype promotion for tests of our own numerics."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """On, unless the test module says `STRICT_PROMOTION = False` (optax's AdamW needs that)."""
    if not getattr(request.module, "STRICT_PROMOTION", True):
        yield
        return
    with jax.numpy_dtype_promotion("strict"):
        yield
