"""Limit of open files, and errors from a lack of files, memory or threads."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

WANTED = 2**16  # enough for a run; programs that close every possible descriptor get slow above
RESERVED = 128  # for the store, checkpoints, libraries and the device
EXHAUSTED = (errno.EMFILE, errno.ENFILE)

_original: list[int] = []  # soft limit at the start of this process
# Words of Python's RuntimeError, which has no error number.
NO_THREAD = "can't start new thread"


def limit_of_files() -> int:
    """Return the number of files this process may have open at once."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return WANTED if soft == resource.RLIM_INFINITY else soft


def original_limit() -> int:
    """Return the limit from before `raise_limit`. Agents' programs start with it."""
    return _original[0] if _original else limit_of_files()


def raise_limit() -> int:
    """Raise the soft limit of open files as far as possible, up to WANTED, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _original[:] = _original or [soft]
    limit = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    while soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            break
        limit //= 2  # macOS has a second, lower limit
    return limit_of_files()


def number_free() -> int:
    """Return the number of files that may still be opened outside the run itself."""
    return raise_limit() - number_open() - RESERVED


def number_open() -> int:
    """Return the number of files this process has open, or 64 if the system does not say."""
    for directory in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(directory))
    return 64


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes, outermost first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = current.__cause__ or current.__context__


def is_exhausted(error: BaseException) -> bool:
    """Return True if the error was caused by running out of file descriptors."""
    return any(isinstance(cause, OSError) and cause.errno in EXHAUSTED for cause in causes(error))


def lacks_resources(error: BaseException) -> bool:
    """Return True if the error was caused by a lack of memory, threads or file descriptors."""
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno in (*EXHAUSTED, errno.ENOMEM))
        or (isinstance(cause, RuntimeError) and NO_THREAD in map(str, cause.args))
        for cause in causes(error)
    )
