"""Garbage collection as in a run, so that a stall is the attack's and not the test process's."""

import gc
from collections.abc import Iterator

import pytest

from lightning_jax.train.runtime import COLLECTION_THRESHOLDS


@pytest.fixture(autouse=True)
def collector_of_a_run() -> Iterator[None]:
    """Freeze what other tests left, and collect as often as a run does.

    tests/conftest.py makes collections rare, so each of them scans enough objects to stop the
    event loop for 15 to 30 ms.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    yield
    gc.set_threshold(*thresholds)
