"""State of a run's process, as files in its directory tell it."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from lightning_jax.errors import Coded
from lightning_jax.system.files import write_whole
from lightning_jax.train.directory import ENDED, LOCK

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class End:
    """End of a run's last process."""

    status: Status
    reason: str = ""  # code of the error, if it failed
    detail: str = ""  # message of the error
    time_s: float = 0.0  # since the epoch


@contextmanager
def recorded_end(directory: Path) -> Iterator[None]:
    """Write how the block ends. A process that is killed writes nothing."""
    path = directory / ENDED
    path.unlink(missing_ok=True)  # the file is about an earlier process
    end = End("finished")
    try:
        yield
    except BaseException as error:
        end = End(status := status_of(error))
        if status == "failed":
            reason = error.reason if isinstance(error, Coded) else type(error).__name__
            end = replace(end, reason=reason, detail=str(error))
        raise
    finally:
        write_whole(path, json.dumps(asdict(end) | {"time_s": time.time()}) + "\n")


def status_of(error: BaseException | None) -> Status:
    """Return how a run that this error ends has ended."""
    if error is None:
        return "finished"
    is_stop = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
    return "stopped" if is_stop else "failed"


def read_end(directory: Path) -> End | None:
    """Return how the run's last process ended, or None if it runs, was killed or is older."""
    try:
        return End(**json.loads((directory / ENDED).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def is_locked(directory: Path) -> bool:
    """Return True if a process trains in the directory. The lock is taken for an instant."""
    path = directory / LOCK
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # a read-only directory, a file system without locks
        return False
