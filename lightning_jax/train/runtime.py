"""Memory of a long-running process: garbage collection and the C heap."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

# With Python's default of 700, 10, 10, a reply with 256,000 alternatives triggers 20 full
# collections and blocks the event loop for up to 0.1 s.
COLLECTION_THRESHOLDS = (5_000, 10, 100)


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
