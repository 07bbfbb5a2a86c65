"""Tests of memory limits, with the files of a machine and its control groups in a folder.

`freeze_objects` freezes once, after a collection, and undoes only its own work.
"""

import gc
import resource
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_jax.system.memory import (
    COLLECTION_THRESHOLDS,
    freeze_objects,
    memory_limits,
    smallest_limit,
)

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 16 GiB with 10 free, on which this process holds 1 GiB."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemAvailable: {10 * 2**20} kB\n")
    write(tmp_path, "proc/self/status", f"VmRSS:\t{2**20} kB\nRssAnon:\t{2**19} kB\n")
    return tmp_path


def write(root: Path, name: str, text: str | int) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{text}\n")


def test_free_memory_includes_what_the_process_holds(root: Path) -> None:
    assert smallest_limit(root).num_bytes == 11 * GIB
    write(root, "proc/self/status", f"VmRSS:\t{12 * 2**20} kB")
    assert smallest_limit(root).num_bytes == 16 * GIB
    with (root / "proc/meminfo").open("a") as file:
        file.write(f"SwapFree: {2**20} kB\n")
    assert smallest_limit(root).num_bytes == 17 * GIB


def test_a_machine_without_these_files_has_its_memory(tmp_path: Path) -> None:
    assert smallest_limit(tmp_path).num_bytes > 2**28


def test_the_lowest_group_above_the_process_counts(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/user.slice/job/step")
    write(root, "sys/fs/cgroup/user.slice/job/step/memory.max", "max")
    write(root, "sys/fs/cgroup/user.slice/job/memory.max", 4 * GIB)
    write(root, "sys/fs/cgroup/user.slice/memory.max", 8 * GIB)
    found = smallest_limit(root)
    assert found.num_bytes == 4 * GIB and "user.slice/job/memory.max" in found.name
    # The group's other processes hold 1 GiB; files can be reclaimed.
    write(root, "sys/fs/cgroup/user.slice/job/memory.stat", f"anon {3 * GIB // 2}\nfile {GIB}")
    assert smallest_limit(root).num_bytes == 3 * GIB


def test_a_container_sees_its_group_at_the_top(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpu:/docker/ab\n4:memory:/docker/ab\n0::/")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 2 * GIB)
    assert smallest_limit(root).num_bytes == 2 * GIB
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)  # none
    assert smallest_limit(root).num_bytes == 11 * GIB


@pytest.mark.parametrize(
    ("letter", "kind"), [("v", resource.RLIMIT_AS), ("d", resource.RLIMIT_DATA)]
)
def test_ulimits_count_less_what_jax_reserves(root: Path, letter: str, kind: int) -> None:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (2**44, before[1]))  # 16 TiB, which stops nothing
    try:
        (found,) = (limit for limit in memory_limits(root) if f"ulimit -{letter}" in limit.name)
    finally:
        resource.setrlimit(kind, before)
    assert 2**44 - 4 * GIB < found.num_bytes < 2**44
    assert found.fix == f"set ulimit -{letter} unlimited"


# Garbage


class Node:
    """Member of a reference cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True, scope="module")
def nothing_frozen() -> Iterator[None]:
    """Unfreeze the objects that conftest.py froze; tests here collect garbage themselves."""
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
