"""Helpers of the `lightning-jax` command. Imports nothing heavy."""

import argparse
import asyncio
import errno
import hashlib
import logging
import os
import platform
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOPPED = "stopped; run the same command to resume from the last checkpoint"
MIN_COMPILE_S = 0.3  # faster compilations are not cached

log = logging.getLogger(__name__)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE` and settings, parsed to `arguments.config` and `arguments.settings`."""
    parser.add_argument("--config", required=True, help="YAML file with settings")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="or another YAML file; later values override earlier ones",
    )


def add_optional_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE`, which may be left out, and settings. See `settings_layers`."""
    parser.add_argument("--config", help="YAML file with settings (default: config.yaml)")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="FILE|key=value",
        help="YAML files and settings; later values override earlier ones",
    )


def settings_layers(arguments: argparse.Namespace, default: Path) -> list[str]:
    """Return the files and settings of a command line, lowest first.

    The file `default`, if it exists, comes first if the command line names no file.
    """
    layers = [arguments.config] * (arguments.config is not None) + arguments.settings
    has_file = any("=" not in layer or Path(layer).is_file() for layer in layers)
    if has_file or not default.is_file():
        return layers
    return [str(default), *layers]


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Call `parse_args`, but accept settings on both sides of `--config`."""
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "settings") or any(word.startswith("-") for word in rest)):
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.settings += rest
    return arguments


def log_plainly() -> None:
    """Print this package's log messages as they are, and only warnings of other packages."""
    # force: libraries imported earlier may have configured the root logger.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("lightning_jax").setLevel(logging.INFO)


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

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    replaced = {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def is_unwritable(error: OSError) -> bool:
    """Return True if the disk is full or the path is not writable, which is not a bug of ours."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def keep_compiled() -> None:
    """Make JAX cache compiled programs in the user's cache directory.

    A cache directory that JAX already has, for example from JAX_COMPILATION_CACHE_DIR, is kept.
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. An unwritable directory is not an error.

    Compilation is most of the wait when a run resumes, a second run begins or a server restarts.
    The cache takes little space: SmolLM2's programs take 0.2 MB each.
    """
    import jax

    configured: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if configured is not None:
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
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)


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
