"""Open files: the limit of this process, what a run needs of it, and telling of its end."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

WANTED = 2**16  # more is of no use to a run, and slow for programs that close all they could have
RESERVED = 128  # for the store, checkpoints, libraries and the device
EXHAUSTED = (errno.EMFILE, errno.ENFILE)

_original: list[int] = []  # the soft limit that this process began with


def limit_of_files() -> int:
    """Return how many files this process may have open at once."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return WANTED if soft == resource.RLIM_INFINITY else soft


def original_limit() -> int:
    """Return the limit from before `raise_limit`, which programs get."""
    return _original[0] if _original else limit_of_files()


def raise_limit() -> int:
    """Raise the soft limit of open files as far as it may be, up to WANTED; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _original[:] = _original or [soft]
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
        wanted //= 2  # macOS has a lower limit beside this one
    return limit_of_files()


def number_free() -> int:
    """Return how many files may be opened by whoever is not the run itself."""
    return raise_limit() - number_open() - RESERVED


def number_open() -> int:
    """Return how many files this process has open, as far as the system says."""
    for directory in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(directory))
    return 64


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, the outermost first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = current.__cause__ or current.__context__


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error comes of having no descriptor left."""
    return any(isinstance(each, OSError) and each.errno in EXHAUSTED for each in causes(error))
