"""Tests that `freeze_objects` freezes once, after a collection, and undoes only its own work."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from lightning_jax.system.memory import COLLECTION_THRESHOLDS, freeze_objects


class Node:
    """Member of a reference cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True, scope="module")
def nothing_frozen() -> Iterator[None]:
    """Unfreeze the objects that conftest.py froze; each test here collects garbage itself."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_objects_are_frozen_and_collections_rarer_within_and_not_after() -> None:
    before = gc.get_threshold()
    with freeze_objects():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == COLLECTION_THRESHOLDS != before
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_freeze_ends_with_an_error() -> None:
    with pytest.raises(KeyError), freeze_objects():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_before_it_would_be_frozen() -> None:
    node = Node()
    dead = weakref.ref(node)
    del node
    with freeze_objects():
        assert dead() is None


def test_nested_use_leaves_the_outer_freeze() -> None:
    with freeze_objects():
        with freeze_objects():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
