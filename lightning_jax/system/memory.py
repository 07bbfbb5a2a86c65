"""Memory of this process: limits that it has to keep, garbage collection and the C heap."""

import contextlib
import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Addresses and data that a process of JAX reserves beyond its peak resident memory, most of them
# holes that malloc has returned. Measured on SmolLM2 runs, 25 November 2026, x86-64 Linux, 2 cores:
# up to 2.73 and 1.89 GiB (benchmarks/LOG.md).
_RESERVED = {"v": (resource.RLIMIT_AS, 3 * 2**30), "d": (resource.RLIMIT_DATA, 2 * 2**30)}
# Mount point, file of the limit, and field of memory.stat with the memory that cannot be reclaimed.
_V2 = ("", "memory.max", "anon")
_V1 = ("memory", "memory.limit_in_bytes", "total_rss")

# With Python's default of 700, 10, 10, a reply with 256,000 alternatives triggers 20 full
# collections and blocks the event loop for up to 0.1 s.
COLLECTION_THRESHOLDS = (5_000, 10, 100)


@dataclass(frozen=True)
class Limit:
    """Bytes that this process may hold in all. `name` says what sets the limit, `fix` the cure."""

    num_bytes: int
    name: str
    fix: str


def smallest_limit(root: Path = Path("/")) -> Limit:
    """Return the limit that this process reaches first.

    `root` contains `proc` and `sys/fs/cgroup`. Without them, as on macOS, the limit is the
    machine's memory or ulimit's.
    """
    return min(memory_limits(root), key=lambda limit: limit.num_bytes)


def memory_limits(root: Path = Path("/")) -> list[Limit]:
    """Return all limits that are set. What this process holds already is part of each."""
    status = _fields(root / "proc/self/status")
    return [_machine(root, status), *_containers(root, status), *_ulimits()]


def _machine(root: Path, status: dict[str, int]) -> Limit:
    fields = _fields(root / "proc/meminfo")
    if "MemAvailable" in fields:
        free = fields["MemAvailable"] + status.get("VmRSS", 0)
        size = min(free, fields.get("MemTotal", free)) + fields.get("SwapFree", 0)
        return Limit(size, "this machine's free memory and swap", "end other programs")
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Limit(size, "this machine's memory", "use a larger machine")


def _containers(root: Path, status: dict[str, int]) -> Iterator[Limit]:
    """Yield the limits of this process's control groups and of all groups above them.

    What other processes of the group hold is subtracted.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name, field = _V1 if controllers else _V2
        top = root / "sys/fs/cgroup" / mount
        inside = Path(path.lstrip("/"))
        # In a container the path may be the host's. Its last parent is then the container itself.
        for group in (top / inside, *(top / parent for parent in inside.parents)):
            limit = "".join(_lines(group / name)[:1]).strip()
            if limit.isdecimal() and int(limit) < 2**60:  # a larger one is v1's word for no limit
                others = _fields(group / "memory.stat").get(field, 0) - status.get("RssAnon", 0)
                file = group / name
                yield Limit(int(limit) - max(others, 0), f"the container ({file})", f"raise {name}")


def _ulimits() -> Iterator[Limit]:
    for letter, (kind, reserved) in _RESERVED.items():
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            name = f"ulimit -{letter} (less {reserved >> 20} MiB that JAX reserves)"
            yield Limit(max(soft - reserved, 0), name, f"set ulimit -{letter} unlimited")


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of names and values, in bytes."""
    fields = {}
    for words in map(str.split, _lines(path)):
        if len(words) > 1 and words[1].isdecimal():
            fields[words[0].rstrip(":")] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return fields


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []


@contextlib.contextmanager
def freeze_objects() -> Iterator[None]:
    """Exclude current objects from garbage collection, and collect less often, in this context.

    Imported modules and traced programs are a quarter of a million objects or more. A full scan of
    them pauses token generation for a tenth of a second, again and again. Do nothing if objects are
    already frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def return_freed_memory() -> None:
    """Return freed memory to the system; glibc by itself keeps blocks of a few MB.

    A step frees thousands of them, in an order that leaves gigabytes of holes. Do nothing on
    systems without glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
