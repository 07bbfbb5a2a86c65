"""Tests of what commands share: signals and the compilation cache."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lightning_jax.cli import runtime
from lightning_jax.cli.main import main
from lightning_jax.cli.runtime import stop_on_sigterm
from lightning_jax.testing.tiny import TINY_RUN

PROGRAM = """
import jax, logging
from lightning_jax.cli import runtime
logging.basicConfig(level=logging.INFO, format="%(message)s")
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
runtime.keep_compiled()
jax.jit(lambda x: x * 3 + 1)(jax.numpy.ones(5)).block_until_ready()
print(jax.config.jax_compilation_cache_dir, "/jax/compilation_cache/cache_hits" in found)
"""

COUNTED = """
import sys, jax
from lightning_jax.cli.main import main
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
assert main(sys.argv[1:]) == 1  # a random model earns nothing
names = ("compile_requests_use_cache", "cache_hits")
print(*(found.count(f"/jax/compilation_cache/{name}") for name in names))
"""


def start(cache: Path, **more: str) -> tuple[str, str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMP", "JAX_PERS"))}
    environment = kept | {"XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"} | more
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    directory, hit = child.stdout.split()
    return directory, hit, child.stderr


def test_the_second_process_reads_what_the_first_compiled(tmp_path):
    directory, hit, _ = start(tmp_path)
    assert hit == "False" and Path(directory).parent == tmp_path / "lightning_jax"
    assert start(tmp_path)[:2] == (directory, "True")


@pytest.mark.slow  # two whole runs of a tiny model
def test_second_start_of_a_run_compiles_nothing(tmp_path: Path) -> None:
    main(["new", str(tmp_path / "dates")])
    settings = TINY_RUN | {"model.name": "tiny", "eval.num_tasks": 2}
    command = ["train", "--config", "config.yaml", *(f"{k}={v}" for k, v in settings.items())]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def train(run_dir: str) -> tuple[int, int]:
        """Return the numbers of programs that the run needed and that it found in the cache."""
        done = subprocess.run(
            [sys.executable, "-c", COUNTED, *command, f"run_dir={run_dir}"],
            cwd=tmp_path / "dates",
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        needed, found = done.stdout.split()[-2:]
        return int(needed), int(found)

    needed, found = train("runs/first")
    assert needed > 10 and found < needed
    assert train("runs/second") == (needed, needed)


def test_a_place_that_jax_was_told_of_stays(tmp_path):
    directory, *_ = start(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert directory == str(tmp_path / "own") and not (tmp_path / "lightning_jax").exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "a file").write_text("in the way")
    directory, _, errors = start(tmp_path / "a file")
    assert directory == "None" and str(tmp_path / "a file") in errors and "Traceback" not in errors


def test_a_full_device_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def allocate(_: Any) -> int:
        jnp.zeros(2**45, jnp.uint8)
        return 0

    monkeypatch.setattr("lightning_jax.cli.commands.runs.Runs.run", allocate)
    assert main(["runs"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: a device has too little free memory (Out of memory")
    assert "35184372088832" in printed and "batch.rows" in printed and printed.count("\n") == 1
    with pytest.raises(jax.errors.JaxRuntimeError) as other:
        jax.jit(lambda x: jax.pure_callback(lambda _: 1 / 0, x, x))(1.0).block_until_ready()
    assert runtime.lack_of_memory(other.value) is None
    assert runtime.lack_of_memory(ValueError("RESOURCE_EXHAUSTED: by another")) is None


@pytest.mark.parametrize("interrupts", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_interrupts_where_nothing_else_was_asked_for(
    restored_sigterm: None, interrupts: Any
) -> None:
    handler = signal.signal(signal.SIGINT, interrupts)
    try:
        stop_on_sigterm()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_sigterm_goes_to_the_present_handler_of_sigint(restored_sigterm: None) -> None:
    stop_on_sigterm()
    seen: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert seen == [signal.SIGINT]


STOPPABLE = """
import asyncio, os, signal
from lightning_jax.cli.runtime import run_until_stopped

async def main():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        {then}
        raise

try:
    run_until_stopped(main())
except asyncio.CancelledError:
    print("ended", flush=True)
"""


@pytest.mark.parametrize(
    ("then", "lines", "code"),
    [
        ("pass", ["cancelled", "ended"], 0),
        ("os.kill(os.getpid(), signal.SIGINT); __import__('time').sleep(30)", ["cancelled"], 130),
    ],
)
def test_the_second_stop_ends_the_process_at_once(then: str, lines: list[str], code: int) -> None:
    command = [sys.executable, "-c", STOPPABLE.format(then=then)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (child.stdout.split(), child.returncode) == (lines, code)


def test_a_reader_that_has_ended_is_no_error() -> None:
    command = [sys.executable, "-m", "lightning_jax", "config"]
    reading, writing = os.pipe()
    os.close(reading)  # as `head` does after its lines
    with open(writing, "wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
