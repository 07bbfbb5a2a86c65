"""Test setup: eight simulated CPU devices, strict numerics, and unchanged logging."""

import contextlib
import gc
import importlib.util
import os
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

# Tests compile far more than they compute. Without optimizations, with one LLVM module a program
# and with the older emitters of fusions, which later releases lack, they take half the time.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
    )
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import logging
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import pytest
from beartype import BeartypeConf
from beartype.claw import beartype_package

# Check the types of packages without arrays. jaxtyping's hook, which pyproject.toml names for the
# others, also compares axes, and makes each call of a function several times as long.
beartype_package("lightning_jax", conf=BeartypeConf(claw_is_pep526=False))

jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("busy", deadline=None)  # no deadline on a busy machine
hypothesis.settings.load_profile("busy")


MAX_MAPS = 25_000  # memory maps of a process
COMPILING_S = 0.3  # a test that took less has compiled little

LONGEST = (
    "test_trainer.py",
    "test_lora_run.py",
    "test_own_weights_run.py",
    "test_policies_run.py",
    "test_main.py",
    "test_verify.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled JAX programs and Python bytecode between tests, in all processes.

    Take Ctrl-C as in the foreground, also under nohup or in the background of a script, whose
    processes ignore it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert config.cache is not None, "pytest's cache is switched off"
    settings = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for subprocesses of tests
    if sys.dont_write_bytecode:  # set if the source tree must stay clean
        directory = str(config.cache.mkdir("bytecode"))
        sys.dont_write_bytecode, sys.pycache_prefix = False, directory
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no process is left with them at the end."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


def pytest_collection_finish() -> None:
    """Freeze imported objects and make collections rarer.

    Tracing makes millions of objects that are not garbage, which the collector need not scan again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def bounded_programs() -> Iterator[None]:
    """Drop compiled programs before the process has too many memory maps.

    Each program on a CPU takes about seven. Beyond the kernel's limit (65,530 by default) JAX ends
    in a segmentation fault when it loads the next one.
    """
    start = time.monotonic()
    yield
    if time.monotonic() - start < COMPILING_S:
        return
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        if sum(1 for _ in maps) > MAX_MAPS:
            jax.clear_caches()
            gc.collect()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the longest stall of the event loop in tests/abuse."""
    stops = [
        (float(value), report.nodeid)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == "longest_stop_ms"
    ]
    if stops:
        worst, test = max(stops)
        terminalreporter.write_line(
            f"event loop's longest stop in {len(stops)} cases: {worst:.0f} ms in {test}"
        )


@pytest.fixture(scope="session", autouse=True)
def undrawn() -> Iterator[None]:
    """Disable drawing of curves, which takes longer than the steps of a test run.

    Tests of the plot enable it again.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "lightning_jax.train.watch.metrics" in sys.modules:
            patch.setattr("lightning_jax.train.watch.metrics.plot_curves", lambda *_: None)
        yield


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Events of JAX's tracing, lowering and compiling while a test runs."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(scope="session")
def h100() -> Any:
    """Devices of one H100 that is not here. Skip the test without XLA's compiler for GPUs."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = [] if plugins is None else plugins.submodule_search_locations or []
    if not any(path for folder in folders for path in Path(folder).glob("xla_cuda1*")):
        pytest.skip("JAX's CUDA plugin is not installed")
    from lightning_jax.train.memory.targets import target_devices

    return tuple(target_devices("h100")[0])


@pytest.fixture
def restored_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler that `train` replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Undo the logging set-up of commands that run in this process."""
    yield
    root = logging.getLogger()
    # pytest's own handlers are of other types.
    root.handlers[:] = [
        found for found in root.handlers if type(found) is not logging.StreamHandler
    ]
    root.setLevel(logging.WARNING)
    logging.getLogger("lightning_jax").setLevel(logging.NOTSET)
