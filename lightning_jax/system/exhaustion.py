"""Errors from running out of what all programs of a machine share: memory, threads, descriptors."""

import errno

from lightning_jax.system.descriptors import causes, is_exhausted

# Words of Python's RuntimeError, which has no error number.
NO_THREAD = "can't start new thread"


def lacks_resources(error: BaseException) -> bool:
    """Return True if the error was caused by a lack of memory, threads or file descriptors."""
    return is_exhausted(error) or any(map(_is_lack, causes(error)))


def _is_lack(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and NO_THREAD in map(str, error.args)
