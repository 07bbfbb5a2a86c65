"""Python's garbage collector and a process that serves."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Until the end, the collector leaves alone what the process holds now.

    That is imported modules and traced programs, a quarter of a million objects or more. Looking
    through all of them takes a tenth of a second in which no token is sent, again and again.
    Nothing happens where somebody froze objects before.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
