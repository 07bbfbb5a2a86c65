"""Files in a run's directory, and what can be told from them without JAX."""

import asyncio
import fcntl
import json
import logging
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock, Timeout

from lightning_jax.errors import Coded
from lightning_jax.models.model_files import MERGED
from lightning_jax.settings import ConfigError
from lightning_jax.settings.paths import absolute_paths
from lightning_jax.system.files import make_private, warn_if_open, write_whole
from lightning_jax.system.text import in_one_line
from lightning_jax.train.config import Config

log = logging.getLogger(__name__)

Status = Literal["finished", "stopped", "failed"]

SETTINGS, SOURCES, METRICS = "config.yaml", "sources.json", "metrics.jsonl"
STORE, CHECKPOINTS = "store.sqlite", "checkpoints"
REFERENCE = "reference"  # weights that a KL is measured to
WARMUP_BEST = "warmup_best"  # weights of the best probe while a warm-up runs
LOCK, ENDED = "run.lock", "ended.json"
SINKS_OPENED = "sinks.json"  # id of the run for metric sinks, and those that know it
LOCK_S = 1.0  # to wait for the lock
PROMPTS = "prompts.yaml"  # those that searches chose, by step
EXPORTED = "policy.json"  # step of the weights in `policy`; absent while they are written


def with_fixed_paths(config: Config) -> Config:
    """Return settings whose paths lead to the same files if foreign code changes the directory."""
    return replace(absolute_paths(config), run_dir=os.path.abspath(config.run_dir))


def require_run(directory: Path, *names: str) -> None:
    """Raise ConfigError unless this is the directory of a run, with files of these names."""
    if not directory.is_dir():
        raise ConfigError.not_found(
            str(directory),
            f"{directory} is no directory; expected the directory of a run. Check the path.",
        )
    for name in names:
        if not (directory / name).is_file():
            raise ConfigError(
                f"{directory} has no {name}; expected the directory of a run. Check the path.",
                reason="incomplete",
                key=str(directory / name),
            )


def newest_checkpoint(directory: Path) -> int:
    """Return the step of the run's newest checkpoint, or -1 if it has none."""
    # A checkpoint that is being written has another name.
    names = (path.name for path in (directory / CHECKPOINTS).glob("*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def exported_step(directory: Path) -> int | None:
    """Return the step of the weights that a run exported, or None if it has exported none.

    Raises ConfigError if the file that says so is damaged.
    """
    path = directory / EXPORTED
    try:
        return int(json.loads(path.read_text())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError.malformed(
            str(path),
            f"{path} is damaged ({in_one_line(repr(error))}); delete it to use the run's newest "
            "checkpoint.",
        ) from error


@dataclass(frozen=True)
class TrainedWeights:
    """Weights of a run on disk: its exported policies, or a checkpoint."""

    step: int
    path: Path
    is_exported: bool


def find_weights(directory: Path) -> TrainedWeights:
    """Return the policy that a run exported, or its newest checkpoint if it has not ended.

    Raises ConfigError if there is neither.
    """
    if (step := exported_step(directory)) is not None:
        return TrainedWeights(step, directory / MERGED, is_exported=True)
    if (step := newest_checkpoint(directory)) >= 0:
        return TrainedWeights(step, directory / CHECKPOINTS / str(step), is_exported=False)
    fact, fix = "does not exist", "check the path"
    if directory.is_dir():
        fact = "has neither a trained policy nor a checkpoint yet"
        fix = "let it end, stop it with Ctrl-C after a step, or lower checkpoint.every"
    raise ConfigError.not_found(str(directory), f"run {directory} {fact}; {fix}.")


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


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory. Raises ConfigError if another process trains there."""
    make_private(directory)
    warn_if_open(directory)
    lock = FileLock(directory / LOCK)
    try:
        _acquire(lock)
    except Timeout:
        raise ConfigError(
            f"another process trains in {directory}; stop it, wait for it, or set another run_dir.",
            reason="locked",
            key="run_dir",
        ) from None
    except (OSError, NotImplementedError) as error:  # a file system without locks
        log.info("%s cannot be locked (%s); do not start a second run there", directory, error)
    try:
        with recorded_end(directory):
            yield
    finally:
        lock.release()


def _acquire(lock: FileLock) -> None:
    """Take the lock. Raises Timeout if it is not free for an instant within LOCK_S.

    Whoever looks whether a run is going on shares the lock for an instant. Tries at random moments
    do not keep step with looks at regular ones.
    """
    until = time.monotonic() + LOCK_S
    while True:
        try:
            lock.acquire(timeout=0)
            return
        except Timeout:
            if time.monotonic() > until:
                raise
            time.sleep(random.uniform(0.0, 0.02))


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
