"""Limited execution of programs that work in a folder: coding agents and test scripts.

A box is a temporary copy of a task's files, with directories for the home, temporary files and
logs. Programs run one after the other in it. `namespaces` keeps their writes inside the box.
`processes` only limits them, and is for systems without user namespaces. Neither is a boundary
against an attacker: programs share the kernel and the network with this machine.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from lightning_jax.errors import UserError
from lightning_jax.rollouts.agents.process import ProgramEnd, ProgramLimits, run_program
from lightning_jax.system.trees import is_within, remove_tree

log = logging.getLogger(__name__)

SandboxKind = Literal["namespaces", "processes"]

LAUNCHER = Path(__file__).with_name("isolate.py")
NO_LIMITS = ProgramLimits()
POLL_S = 0.2  # between two measurements of a box's size
MAX_FILES = 20_000  # files and directories of a box
MAX_DEPTH = 200  # levels of directories in a box
PROBE_S = 20.0
WORK, TESTS, LOGS = "/app", "/tests", "/logs"  # paths that test scripts name
INSIDE = {WORK: "work", "/root": "home", "/tmp": "tmp", LOGS: "logs"}
TEST_HOME = "/home/tests"  # of the tests, because programs may have left files in theirs


@dataclass(frozen=True)
class BoxLimits:
    """Limits of one program in a box, including all processes it starts."""

    timeout_s: float = 60.0
    max_processes: int = 64
    memory_mib: int = 2048
    disk_mib: int = 256  # of the whole box, and of each file


@dataclass(frozen=True)
class Box:
    """Directories of one attempt at a task."""

    folder: Path
    kind: SandboxKind
    workdir: str = WORK  # path of the working directory with namespaces
    visible: tuple[str, ...] = ()  # paths that programs read, such as their interpreter
    hidden: tuple[str, ...] = ()  # directories that they must not read, such as the tests
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def test_home(self) -> Path:
        return self.folder / "test_home"

    def path_of(self, path: str) -> str:
        """Return where programs in the box find a path of `INSIDE`, /tests or the tests' home."""
        if self.kind == "namespaces":
            return self.workdir if path == WORK else path
        return str(self.folder / (INSIDE | {TESTS: "tests", TEST_HOME: "test_home"})[path])


@contextlib.contextmanager
def open_box(
    kind: SandboxKind,
    workdir: str = WORK,
    visible: Sequence[str] = (),
    hidden: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Box]:
    """Make a box, and remove it at the end with all that programs wrote."""
    folder = Path(tempfile.mkdtemp(prefix="lightning-box-")).resolve()
    try:
        for name in (*INSIDE.values(), "tests", "root"):
            (folder / name).mkdir()
        seen = (*map(os.path.realpath, {sys.prefix, sys.base_prefix}), *visible, sys.prefix)
        yield Box(folder, kind, workdir, seen, (*hidden, str(folder)), variables or {})
    finally:
        remove_tree(folder)


async def run_boxed(
    box: Box,
    words: Sequence[str],
    environment: Mapping[str, str],
    stdin: bytes = b"",
    limits: BoxLimits = BoxLimits(),
    with_tests: bool = False,
) -> ProgramEnd:
    """Run a program in the working directory of a box, then kill all that it left behind.

    `exceeded` of the result names the limit that it exceeded, a field of `BoxLimits`. With
    `with_tests` it also sees the tests, and has a home that no program before it could write to.
    Raises OSError if it cannot be started.
    """
    file_bytes = limits.disk_mib * 2**20
    settings = {"kind": box.kind, "cwd": box.path_of(WORK), "file_bytes": file_bytes}
    if box.kind == "namespaces":
        inside = INSIDE | {box.workdir: "work"}
        inside = inside if box.workdir == WORK else {k: v for k, v in inside.items() if k != WORK}
        inside |= {TEST_HOME: "test_home"} if with_tests else {}
        settings |= {
            "root": str(box.folder / "root"),
            "writable": {path: str(box.folder / name) for path, name in inside.items()},
            "readable": {TESTS: str(box.tests)} if with_tests else {},
            "visible": box.visible,
            "hidden": box.hidden,
            "max_processes": limits.max_processes,
            "memory_bytes": limits.memory_mib * 2**20,
        }
    if with_tests:
        remove_tree(box.test_home)
        box.test_home.mkdir()
    variables = {
        **environment,
        **box.variables,
        "HOME": box.path_of(TEST_HOME if with_tests else "/root"),
        "TMPDIR": box.path_of("/tmp"),
        "PWD": box.path_of(WORK),
    }
    line = [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(settings), *words]
    num_launchers = 3 if box.kind == "namespaces" else 0
    bounds = ProgramLimits(limits.max_processes + num_launchers, limits.memory_mib * 2**20)
    full = asyncio.ensure_future(_until_full(box.folder, file_bytes))
    return await run_limited(line, variables, stdin, limits.timeout_s, bounds, full)


async def run_limited(
    words: Sequence[str],
    environment: Mapping[str, str],
    stdin: bytes,
    timeout_s: float,
    limits: ProgramLimits = NO_LIMITS,
    full: asyncio.Future[None] | None = None,
) -> ProgramEnd:
    """Run a program until it exits, its time is over or `full` is done. Cancels `full`."""
    program = asyncio.ensure_future(run_program(words, environment, stdin, limits=limits))
    running = {program} if full is None else {program, full}
    try:
        await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if program.done():
            return program.result()
        is_full = full is not None and full.done()
        return ProgramEnd(-9, "", "", "disk_mib" if is_full else "timeout_s")
    finally:
        for future in running:
            future.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await future


def choose_kind(name: str) -> SandboxKind:
    """Return the kind of sandbox for a setting: auto, namespaces or processes.

    Raises UserError for another name, and for namespaces where the system has none.
    """
    if name not in ("auto", "namespaces", "processes"):
        raise UserError.unknown(
            "sandbox",
            f"the sandbox {name!r} does not exist; use auto, namespaces, processes or docker.",
        )
    if name == "processes":
        return "processes"
    if error := namespace_error():
        if name == "namespaces":
            raise UserError.unsupported(
                "sandbox", f"this system makes no user namespaces ({error}); use sandbox=processes."
            )
        return _fallback(error)
    return "namespaces"


@cache
def namespace_error() -> str:
    """Return why programs cannot run in namespaces here, or "" if they can."""
    if sys.platform != "linux":
        return "they are Linux's"

    async def probe() -> ProgramEnd:
        with open_box("namespaces") as box:
            limits = BoxLimits(timeout_s=PROBE_S)
            return await run_boxed(box, ["/bin/sh", "-c", "test -d /app"], {}, limits=limits)

    with ThreadPoolExecutor(1) as pool:  # because this thread may run an event loop
        end = pool.submit(asyncio.run, probe()).result()
    return "" if end.status == 0 else end.errors.strip() or end.exceeded or "no reason given"


@cache
def _fallback(error: str) -> SandboxKind:
    """Warn once that programs may write outside their box."""
    log.warning(
        "this system makes no user namespaces (%s); programs of tasks run with the rights of this "
        "user and may write anywhere (sandbox=processes)",
        error,
        extra={"event": "weak_sandbox"},
    )
    return "processes"


async def _until_full(folder: Path, max_bytes: int) -> None:
    """Return once a box has too many bytes, files or levels."""
    while await asyncio.to_thread(is_within, folder, max_bytes, MAX_FILES, MAX_DEPTH):
        await asyncio.sleep(POLL_S)
