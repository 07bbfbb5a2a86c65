"""Helpers of the `lightning-jax` command. Imports nothing heavy."""

import asyncio
import errno
import hashlib
import logging
import os
import platform
import select
import signal
import sys
from collections.abc import Coroutine
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from lightning_jax.system.process_state import handle_stop_signals

STOPPED = "stopped; run the same command to resume from the last checkpoint"

T = TypeVar("T")
log = logging.getLogger(__name__)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def stop_on_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C, so that the agents' programs are stopped too.

    The signal goes to the current handler of SIGINT. asyncio's handler cancels the main task. An
    exception raised here instead could be lost in a callback of the garbage collector.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # ignored, as in background jobs of a shell
            interrupt = signal.default_int_handler
        interrupt(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, stop)


def run_until_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine. Raise CancelledError if Ctrl-C or SIGTERM has cancelled it.

    A second signal ends the process without any cleanup. An ignored signal, as in background jobs,
    stays ignored.
    """
    received: list[int] = []

    async def cancellable() -> T:
        task, loop = asyncio.create_task(work), asyncio.get_running_loop()

        def stop(number: int, frame: FrameType | None) -> None:
            if received:
                os.write(2, f"{STOPPED}\n".encode())
                os._exit(130)
            received.append(number)
            loop.call_soon_threadsafe(task.cancel)

        with handle_stop_signals(stop):
            return await task

    return asyncio.run(cancellable())


def is_unwritable(error: OSError) -> bool:
    """Return True if the disk is full or the path is not writable, which is not a bug of ours."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def is_closed_output(error: OSError) -> bool:
    """Return True if the reader of the output, such as `head`, has ended. Then discard the rest."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def lack_of_memory(error: Exception) -> str | None:
    """Return a sentence if a device could not allocate an array, and None for any other error."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    code, _, text = str(error).partition(": ")
    if code != "RESOURCE_EXHAUSTED":
        return None
    (fact, *_) = text.splitlines() or [code]
    return (
        f"a device has too little free memory ({fact.split(' [')[0].rstrip('.')}); lower "
        "batch.rows or serve.slots, or end other programs that hold its memory (nvidia-smi lists "
        "those on a GPU), then run the same command again."
    )


def keep_compiled() -> None:
    """Make JAX cache compiled programs in the user's cache directory.

    A cache directory that JAX already has, for example from JAX_COMPILATION_CACHE_DIR, is kept.
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. An unwritable directory is not an error.

    Compilation is most of the wait when a run resumes, a second run begins or a server restarts.
    Programs of any size are kept, so that a second start compiles nothing. The cache takes little
    space: SmolLM2's programs take 0.2 MB each.
    """
    jax, name = sys.modules.get("jax"), "jax_compilation_cache_dir"
    if (getattr(jax.config, name) if jax else os.environ.get(name.upper())) is not None:
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "lightning_jax" / f"compiled-{_machine()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        log.info("%s is not writable; programs are compiled again at every start", folder)
        return
    _set_in_jax(name, str(folder))
    _set_in_jax("jax_persistent_cache_min_compile_time_secs", 0.0)


def _set_in_jax(name: str, value: float | str) -> None:
    """Set a value in JAX or, if it is not imported yet, in the variable that it reads then.

    A wrong setting is told seconds earlier without JAX.
    """
    if jax := sys.modules.get("jax"):
        jax.config.update(name, value)
    else:
        os.environ[name.upper()] = str(value)


def _machine() -> str:
    """Return a key for this kind of CPU.

    Machines may share a home directory, and a program may use instructions that only some of them
    have.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    text = f"{platform.system()} {platform.machine()} {platform.processor()} {features}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
