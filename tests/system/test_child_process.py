"""Tests of child processes: each one ends when asked, with its group, and with this process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_jax.system.child_process import ChildProcess

POLITE = "import sys; print('ready', flush=True); sys.exit(len(sys.stdin.read()))"
SLOW = "import sys, time; print(flush=True); sys.stdin.read(); time.sleep(0.3)"
DEAF = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep(60)
"""


def _start(script: str, end_s: float = 30.0) -> tuple[ChildProcess, str]:
    """Start a script, and return its first line."""
    child = ChildProcess(["-c", script], stdout=subprocess.PIPE, text=True, end_s=end_s)
    assert child.popen.stdout is not None
    with child.popen.stdout as output:
        return child, output.readline().strip()


def _has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_socket_is_its_standard_input() -> None:
    child, _ = _start(POLITE)
    child.socket.sendall(b"abc")
    assert child.end() == 3
    assert child.end() == 3  # once more changes nothing


async def test_end_leaves_the_event_loop_running() -> None:
    child, _ = _start(SLOW)
    turns = asyncio.create_task(asyncio.sleep(0.01))
    assert await child.end_async() == 0
    assert turns.done()


def test_process_that_does_not_listen_is_killed_with_its_group() -> None:
    child, grandchild = _start(DEAF, end_s=0.2)
    assert child.end() == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while not _has_ended(int(grandchild)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stopped_process_goes_on_and_ends() -> None:
    child, _ = _start(POLITE)
    os.kill(child.popen.pid, signal.SIGSTOP)
    assert child.end() == 0


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import time\n"
        "from lightning_jax.system.child_process import ChildProcess\n"
        f"child = ChildProcess(['-c', {POLITE!r}])\n"
        "print(child.popen.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, parent], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline().strip()).isdigit():
            assert line == "ready"
        process.kill()
    deadline = time.monotonic() + 30
    while not _has_ended(int(line)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_child_that_cannot_start_leaves_no_socket() -> None:
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError):
        ChildProcess(["-c", ""], cwd="/does/not/exist")
    assert len(os.listdir("/dev/fd")) == before
