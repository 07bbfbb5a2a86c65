"""Persistent cache of compiled programs.

Compilation is most of the wait when a run resumes, a second run begins or a server restarts. The
cache takes little space: SmolLM2's programs take 0.2 MB each.
"""

import hashlib
import logging
import os
import platform
from pathlib import Path

import jax

log = logging.getLogger(__name__)

MIN_COMPILE_S = 0.3  # faster compilations are not cached


def keep_compiled() -> None:
    """Make JAX cache compiled programs in the user's cache directory.

    A cache directory that JAX already has, for example from JAX_COMPILATION_CACHE_DIR, is kept.
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. An unwritable directory is not an error.
    """
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
