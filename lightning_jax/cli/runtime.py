"""Helpers of the `lightning-jax` command. Imports nothing heavy."""

import argparse
import asyncio
import errno
import hashlib
import logging
import os
import platform
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from lightning_jax.errors import UserError
from lightning_jax.system.signals import handle_stop_signals

Index = Annotated[int, Ge(0), Le(2**31 - 1)]
Limit = Annotated[int, Ge(1), Le(2**31 - 1)]
Port = Annotated[int, Ge(0), Le(65535)]
Positive = Annotated[float, Gt(0)]

STOPPED = "stopped; run the same command to resume from the last checkpoint"

log = logging.getLogger(__name__)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add files and settings, which `settings_layers` reads."""
    parser.add_argument("--config", metavar="FILE", help="the same as FILE before all others")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="FILE|key=value",
        help="YAML files and settings; later values override earlier ones (default: config.yaml)",
    )


def settings_layers(arguments: argparse.Namespace, folder: Path = Path()) -> list[str]:
    """Return the files and settings of a command line, lowest first.

    If the command line names no file, the config.yaml in `folder`, if there is one, comes first.
    Raises UserError if nothing is left.
    """
    layers = [arguments.config] * (arguments.config is not None) + arguments.settings
    has_file = any("=" not in layer or Path(layer).is_file() for layer in layers)
    default = folder / "config.yaml"
    if not has_file and default.is_file():
        layers = [str(default), *layers]
    if not layers:
        raise UserError(
            f"there is no {default}; pass FILE, or change to the directory that has it.",
            reason="missing",
            key="FILE",
        )
    return layers


def number_of(hint: Any) -> Callable[[str], int | float]:
    """Return a parser of numbers that a type such as `Limit` allows, for `add_argument`."""

    def number(text: str) -> int | float:
        from pydantic import TypeAdapter, ValidationError  # not needed for --help

        from lightning_jax.schema import describe

        try:
            return TypeAdapter(hint).validate_python(text)
        except ValidationError:
            message = f"{text!r} cannot be used; expected a number that is {describe(hint)}"
            raise argparse.ArgumentTypeError(message) from None

    return number


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Call `parse_args`, but accept settings on both sides of `--config`."""
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "settings") or any(word.startswith("-") for word in rest)):
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.settings += rest
    return arguments


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


@contextmanager
def cancel_at_stop() -> Iterator[None]:
    """Cancel the current task at the first Ctrl-C or SIGTERM; at the second, end the process.

    It then ends without any cleanup. An ignored signal, as in background jobs, stays ignored.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "a coroutine runs in a task"
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if received:
            os.write(2, f"{STOPPED}\n".encode())
            os._exit(130)
        received.append(number)
        loop.call_soon_threadsafe(task.cancel)

    with handle_stop_signals(stop):
        yield


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
    if _jax_setting("jax_compilation_cache_dir") is not None:
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
    _set_in_jax("jax_compilation_cache_dir", str(folder))
    _set_in_jax("jax_persistent_cache_min_compile_time_secs", 0.0)


def _jax_setting(name: str) -> str | None:
    jax = sys.modules.get("jax")
    return getattr(jax.config, name) if jax else os.environ.get(name.upper())


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
