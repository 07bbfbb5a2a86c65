"""State of a run's process, as files in its directory tell it."""

import asyncio
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from lightning_jax.errors import Coded
from lightning_jax.system.files import write_whole
from lightning_jax.train.directory import ENDED, LOCK

log = logging.getLogger(__name__)

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
        try:
            write_whole(path, json.dumps(asdict(end) | {"time_s": time.time()}) + "\n")
        except OSError:
            if end.status == "finished":
                raise
            log.warning("cannot write %s, as its directory is gone or not writable", path)


def status_of(error: BaseException | None) -> Status:
    """Return how a run that this error ends has ended."""
    if error is None:
        return "finished"
    is_stop = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
    return "stopped" if is_stop else "failed"


def read_end(directory: Path) -> End | None:
    """Return how the run's last process ended, or None if it runs, was killed or is older."""
    try:
        fields = json.loads((directory / ENDED).read_text())
        texts = [fields["status"], *(fields.get(name, "") for name in ("reason", "detail"))]
        is_sound = all(isinstance(text, str) for text in texts) and texts[0] in get_args(Status)
        time_s = float(fields.get("time_s", 0.0))
        return End(**fields | {"time_s": time_s}) if is_sound else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def is_locked(directory: Path) -> bool:
    """Return True if a process trains in the directory.

    The lock is shared for an instant, so that others who ask at the same time see it free. It is
    not taken, which a trainer that starts would notice.
    """
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)  # which ends the share
    return False
