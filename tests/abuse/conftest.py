"""Garbage collection as in a run, because a collection blocks the event loop too."""

import gc
from collections.abc import Iterator

import pytest

from lightning_jax.train.runtime import freeze_objects


@pytest.fixture(autouse=True, scope="module")
def frozen_as_in_a_run() -> Iterator[None]:
    """Collect garbage as a run does.

    tests/conftest.py makes collections so rare that each blocks the event loop for 15 to 30 ms.
    """
    gc.unfreeze()
    with freeze_objects():
        yield
    gc.freeze()
