"""Tests of the sandbox: what programs of a task cannot do, and what ends them."""

import asyncio
import contextlib
import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from coded import raises_coded

from lightning_jax.environments import sandbox
from lightning_jax.environments.sandbox import Box, BoxLimits, SandboxKind, open_box, run_boxed
from lightning_jax.errors import UserError
from lightning_jax.rollouts.agents.process import ProgramEnd

needs_namespaces = pytest.mark.skipif(
    bool(sandbox.namespace_error()), reason="this system makes no user namespaces"
)
KINDS = [pytest.param("namespaces", marks=needs_namespaces), "processes"]
SMALL = BoxLimits(timeout_s=20.0, max_processes=20, memory_mib=400, disk_mib=20)
PATH = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


@pytest.fixture(params=KINDS)
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    with open_box(request.param) as found:
        yield found


def run(box: Box, script: str, limits: BoxLimits = SMALL, with_tests: bool = False) -> ProgramEnd:
    words = ["bash", "-c", script]
    return asyncio.run(run_boxed(box, words, PATH, limits=limits, with_tests=with_tests))


def is_running(word: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                return True
    return False


def test_a_program_works_in_its_directories(box: Box) -> None:
    (box.work / "given").write_text("1\n")
    ended = run(box, "pwd; cat given; echo 2 > made; cp given ~; cp given $TMPDIR; exit 3")
    assert ended.output.splitlines() == [box.path_of("/app"), "1"]
    assert ended.status == 3 and ended.exceeded is None
    assert (box.work / "made").read_text() == "2\n"
    assert (box.folder / "home/given").exists() and (box.folder / "tmp/given").exists()
    again = run(box, "cat ~/given made $TMPDIR/given")
    assert again.output.split() == ["1", "2", "1"]


def test_a_box_is_removed_with_what_is_in_it() -> None:
    with open_box("processes") as box:
        run(box, "mkdir -p a/b; touch a/b/c; chmod 0 a/b; chmod 0 a")
    assert not box.folder.exists()


def test_box_with_deep_directories_is_removed() -> None:
    with open_box("processes") as box:
        ended = run(box, "for i in $(seq 1200); do mkdir d && cd d; done")
    assert ended.status == 0 or ended.exceeded == "disk_mib"
    assert not box.folder.exists()


def test_deep_directories_hide_no_bytes(box: Box) -> None:
    script = "for i in $(seq 1200); do mkdir d && cd d; done; head -c 9M /dev/zero > big; sleep 60"
    assert run(box, script).exceeded == "disk_mib"


# A shell on a new terminal, as coding agents start one for each command.
TERMINAL = """
import os, pty
pid, master = pty.fork()
if not pid:
    os.execv("/bin/sh", ["sh", "-c", "tty; echo heard > /dev/tty"])
output = b""
try:
    while part := os.read(master, 4096):
        output += part
except OSError:  # the shell closed its end
    pass
print(output.decode())
"""


def test_program_opens_a_terminal(box: Box) -> None:
    ended = asyncio.run(run_boxed(box, [sys.executable, "-c", TERMINAL], PATH, limits=SMALL))
    assert [line.strip() for line in ended.output.split()][1:] == ["heard"]


@needs_namespaces
def test_terminals_of_a_sandbox_are_its_own_and_few() -> None:
    code = (
        "import os, pty\nbefore = os.listdir('/dev/pts')\nends = []\n"
        "try:\n    while len(ends) < 100: ends.append(pty.openpty())\n"
        "except OSError: pass\nprint(*before, len(ends))"
    )
    master, other = os.openpty()  # of this machine
    with open_box("namespaces") as box:
        ended = asyncio.run(run_boxed(box, [sys.executable, "-c", code], PATH, limits=SMALL))
    os.close(master)
    os.close(other)
    assert ended.output.split() == ["ptmx", "64"]


def test_tests_have_a_home_of_their_own(box: Box) -> None:
    run(box, "echo x > ~/planted; mkdir -p ../test_home; echo x > ../test_home/planted")
    ended = run(box, "ls -A ~ | wc -l; touch ~/mine && echo written", with_tests=True)
    assert ended.output.split() == ["0", "written"]
    assert run(box, "ls ~").output == "planted\n"


def test_a_program_without_end_is_ended_at_its_time(box: Box) -> None:
    word = f"hang-{uuid.uuid4().hex}"
    start = time.monotonic()
    ended = run(box, f"trap '' TERM; bash -c 'sleep 300; : {word}'", BoxLimits(timeout_s=1.0))
    assert ended.exceeded == "timeout_s" and time.monotonic() - start < 15
    assert not is_running(word)


def test_daemons_end_with_their_program(box: Box) -> None:
    word = f"daemon-{uuid.uuid4().hex}"
    script = f"setsid bash -c 'setsid bash -c \"sleep 300; : {word}\" & sleep 0.2' & sleep 0.5"
    ended = run(box, f"{script}; grep -ac {word} /proc/[0-9]*/cmdline | grep -c ':1'")
    assert int(ended.output) >= 1  # it was there
    assert not is_running(word)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_forks_is_ended(kind: SandboxKind) -> None:
    """The forking stops by itself, so that a failed test does no harm."""
    code = "import os, time\nfor _ in range(8):\n    os.fork()\n    time.sleep(0.1)\ntime.sleep(60)"
    with open_box(kind) as box:
        words = [sys.executable, "-c", code]
        ended = asyncio.run(run_boxed(box, words, PATH, limits=SMALL))
    assert ended.exceeded == "max_processes"


@needs_namespaces
def test_a_fork_bomb_ends() -> None:
    word = f"bomb_{uuid.uuid4().hex}"
    with open_box("namespaces") as box:
        ended = run(box, f"{word}(){{ {word} | {word} & }}; {word}; sleep 60")
    assert ended.exceeded in ("max_processes", "timeout_s")
    assert not is_running(word)


def test_a_program_that_fills_the_disk_is_ended(box: Box) -> None:
    one = run(box, "head -c 100M /dev/zero > big; stat -c %s big")
    assert int(one.output) <= 20 * 2**20  # the limit of a file
    many = "for i in $(seq 9); do head -c 4M /dev/zero > b$i; done; sleep 60"
    assert run(box, many).exceeded == "disk_mib"


def test_a_program_with_too_many_files_is_ended(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_FILES", 100)
    assert run(box, "for i in $(seq 200); do : > f$i; done; sleep 60").exceeded == "disk_mib"


def test_a_program_over_its_memory_fails(box: Box) -> None:
    words = [sys.executable, "-c", "x = bytearray(600 * 2**20)"]
    ended = asyncio.run(run_boxed(box, words, PATH, limits=SMALL))
    assert ended.status != 0 and ("MemoryError" in ended.errors or ended.exceeded == "memory_mib")


# Files in memory: written and mapped nowhere, and mapped by two processes after they were closed.
WRITTEN = """
import os, time
number = os.memfd_create("hidden")
for _ in range(600):
    os.write(number, bytes(2**20))
time.sleep(60)
"""
MAPPED = """
import mmap, os, time
memory = mmap.mmap(-1, MIB * 2**20)
for at in range(0, len(memory), 2**20):
    memory[at : at + 2**20] = bytes(2**20)
os.fork()
for at in range(0, len(memory), 4096):
    memory[at]
time.sleep(SECONDS)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of shared memory are Linux's")
def test_files_in_memory_count_as_memory(box: Box) -> None:
    large = dataclasses.replace(SMALL, disk_mib=1000)  # which limits each file, too
    for code in (WRITTEN, MAPPED.replace("MIB", "500").replace("SECONDS", "60")):
        words = [sys.executable, "-c", code]
        ended = asyncio.run(run_boxed(box, words, PATH, limits=large))
        assert ended.exceeded == "memory_mib"
    shared = MAPPED.replace("MIB", "250").replace("SECONDS", "1")  # once, not for each process
    ended = asyncio.run(run_boxed(box, [sys.executable, "-c", shared], PATH, limits=large))
    assert ended.exceeded is None and ended.status == 0


SEGMENT = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(0, 600 * 2**20, 0o1600)
address = libc.shmat(number, None, 0)
ctypes.memset(address, 1, 600 * 2**20)
libc.shmdt(ctypes.c_void_p(address))
time.sleep(60)
"""


@needs_namespaces
def test_segments_that_nobody_maps_end_a_program() -> None:
    with open_box("namespaces") as box:
        words = [sys.executable, "-c", SEGMENT]
        ended = asyncio.run(run_boxed(box, words, PATH, limits=SMALL))
    assert ended.status == 137 or ended.exceeded == "memory_mib"


def test_much_output_is_cut(box: Box) -> None:
    ended = run(box, "head -c 5M /dev/zero | tr '\\0' x; echo end")
    assert len(ended.output) <= 2**20 and ended.output.endswith("end\n")


@needs_namespaces
def test_writes_outside_fail_and_tests_are_read_only(tmp_path: Path) -> None:
    kept = Path(sys.prefix) / f"written-{uuid.uuid4().hex}"
    outside = [str(kept), "/etc/written", "/usr/written", "/tests/test.sh", "/written"]
    with open_box("namespaces") as box:
        (box.tests / "test.sh").write_text("kept")
        tries = "; ".join(f"(echo x > {path}) 2> /dev/null && echo {path}" for path in outside)
        ended = run(box, f"{tries}; cat /tests/test.sh", with_tests=True)
        assert ended.output == "kept"
        assert (box.tests / "test.sh").read_text() == "kept"
        assert run(box, "cat /tests/test.sh").status != 0  # only with the tests
        temporary = run(box, f"echo x > /tmp/a; ls {tmp_path}")
        assert temporary.status != 0 and (box.folder / "tmp/a").exists()
    assert not kept.exists()


@needs_namespaces
def test_programs_have_no_rights_and_see_neither_processes_nor_homes() -> None:
    folder = os.path.dirname(__file__)
    checks = (
        f"ls -A {folder} /home /run | grep -cv -e : -e '^$'",
        "ls /proc | grep -c '^[0-9]'",
        "grep -h ^CapEff /proc/self/status",
        "unshare -Ur true || echo no new namespace",
        "(echo 60 > /proc/sys/vm/swappiness) || echo no setting",
        "ls /dev | grep -c -e sd -e vd -e mem",
    )
    with open_box("namespaces", hidden=[folder]) as box:
        found = run(box, "; ".join(f"({check}) 2> /dev/null" for check in checks)).output
    hidden, processes, *rest = found.splitlines()
    assert hidden == "0" and int(processes) < 8
    assert rest == ["CapEff:\t0000000000000000", "no new namespace", "no setting", "0"]


@needs_namespaces
def test_another_working_directory_and_visible_paths(tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool/name").write_text("hammer\n")
    with open_box("namespaces", "/repo", [str(tmp_path / "tool")]) as box:
        ended = run(box, f"pwd; ls -d /app 2> /dev/null; cat {tmp_path}/tool/name; touch made")
        assert ended.output.split() == ["/repo", "hammer"] and (box.work / "made").exists()


def test_kinds_are_chosen_and_a_weak_one_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with raises_coded(UserError, "unknown", "sandbox"):
        sandbox.choose_kind("jail")
    assert sandbox.choose_kind("processes") == "processes" and not caplog.records
    monkeypatch.setattr(sandbox, "namespace_error", lambda: "not permitted")
    sandbox._fallback.cache_clear()
    assert [sandbox.choose_kind("auto") for _ in "12"] == ["processes", "processes"]
    assert [vars(record)["event"] for record in caplog.records] == ["weak_sandbox"]
    with raises_coded(UserError, "unsupported", "sandbox"):
        sandbox.choose_kind("namespaces")
