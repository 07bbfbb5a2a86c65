"""Tests of the objects excluded from garbage collection, and for how long."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from lightning_jax.garbage import lasting_objects


class Node:
    """Member of a reference cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Unfreeze the objects that conftest.py froze."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_there_lasts_and_what_comes_later_is_collected() -> None:
    early = Node()
    with lasting_objects():
        late = Node()
        dead = weakref.ref(early), weakref.ref(late)
        del early, late
        gc.collect()
        assert [each() is None for each in dead] == [False, True]
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert dead[0]() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_what_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with lasting_objects():
        assert gc.get_freeze_count() <= frozen
    assert gc.get_freeze_count() > 0.9 * frozen
