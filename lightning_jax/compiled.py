"""Compiled programs outlive the process: what was compiled once on a machine is read the next time.

A run that goes on after a crash, a second run, a server that starts again: compiling is most of the
wait at their start, and a program takes little space (SmolLM2's take 0.2 MB each).
"""

import hashlib
import logging
import os
import platform
from pathlib import Path

import jax

log = logging.getLogger(__name__)

MIN_COMPILE_S = 0.3  # what takes less is compiled anew


def keep_compiled() -> None:
    """From now on JAX keeps what it compiles in the user's cache folder, and looks there first.

    Where JAX was told of a place already, by JAX_COMPILATION_CACHE_DIR say, that one stays; with
    JAX_ENABLE_COMPILATION_CACHE=false nothing is kept. A folder that cannot be written is no error.
    """
    told: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if told is not None:
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "lightning_jax" / f"compiled-{_machine()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        log.info("%s cannot be written; every start compiles anew", folder)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)


def _machine() -> str:
    """Of machines that share a home, each kind has its own: a program may use what only one has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    text = f"{platform.system()} {platform.machine()} {platform.processor()} {features}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
