"""Runs a program to its end, under three promises: what it prints is kept within bounds and never
blocks it, nothing it started outlives it, and whoever waits for it may be cancelled.

A program has a session of its own, whose processes get each signal together. A child that leaves
the session is found by a mark in the environment that it inherited, where the system shows
environments (Linux). Only a child that leaves the session and clears its environment escapes.
"""

import asyncio
import logging
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

MAX_OUTPUT = 2**20  # bytes of its standard output that are kept: the last ones
MAX_ERRORS = 2**16  # and of its standard error
GRACE_S = 2.0  # from SIGTERM to SIGKILL
_CHUNK = 2**16
_PROC = Path("/proc")


@dataclass(frozen=True)
class Ended:
    """How a program ended, and the end of what it printed."""

    status: int  # its exit status; minus the signal's number where one killed it
    output: str
    errors: str


async def run_program(
    words: Sequence[str],
    environment: Mapping[str, str],
    stdin: bytes,
    keep_open: Sequence[int] = (),
) -> Ended:
    """Runs a command line to its end, then ends whatever it left behind.

    `keep_open` names file descriptors that the program inherits. Cancelled, it ends the program and
    all that it started: SIGTERM, and SIGKILL after GRACE_S. Raises OSError if it cannot be started.
    """
    mark = f"LIGHTNING_PROGRAM_{secrets.token_hex(16)}"
    process = None
    with tempfile.TemporaryFile() as task, _tail(MAX_OUTPUT) as output, _tail(MAX_ERRORS) as errors:
        task.write(stdin)  # a file, because a program that never reads it would fill a pipe
        task.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=task,
                stdout=output.writer,
                stderr=errors.writer,
                env={**environment, mark: "1"},
                pass_fds=keep_open,
                start_new_session=True,
            )
            output.start()
            errors.start()
            status = await process.wait()
        finally:
            await _end_all(process.pid if process else None, mark.encode())
            if process:
                await process.wait()
        return Ended(status, output.finish(words[0]), errors.finish(words[0]))


class _Tail:
    """The reading end of a pipe, which keeps the last bytes that come out of it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_dropped = 0
        self._kept = bytearray()
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Reads from now on; to be called when the program holds the writing end."""
        self._close_writer()
        self._loop.add_reader(self._reader, self._read)

    def finish(self, program: str) -> str:
        """All that is kept, with what the pipe still holds; nobody ought to write to it now."""
        for _ in range(2**20 // _CHUNK):  # a pipe's fill, and no more if somebody does
            if not self._read():
                break
        if self.num_dropped:
            log.warning(
                "%s printed too much: the first %d bytes are left out and the last %d kept",
                program,
                self.num_dropped,
                len(self._kept),
            )
        return self._kept.decode("utf-8", "replace")

    def close(self) -> None:
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        self._close_writer()

    def _close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def _read(self) -> bool:
        """Whether there was anything."""
        try:
            chunk = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._reader)
        self._kept += chunk
        excess = max(len(self._kept) - self.limit, 0)
        del self._kept[:excess]
        self.num_dropped += excess
        return bool(chunk)


@contextmanager
def _tail(limit: int) -> Iterator[_Tail]:
    tail = _Tail(limit)
    try:
        yield tail
    finally:
        tail.close()


async def _end_all(group: int | None, mark: bytes) -> None:
    """Ends every process of the group and every one with the mark: politely, then for sure."""
    if not _send(signal.SIGTERM, group, mark):
        return
    try:
        give_up = time.monotonic() + GRACE_S
        while time.monotonic() < give_up and _is_alive(group, mark):
            await asyncio.sleep(0.02)
    finally:
        for _ in range(10):  # one that starts others meanwhile is not gone at once
            _send(signal.SIGKILL, group, mark)
            if not _is_alive(group, mark):
                break
            time.sleep(0.001)


def _send(number: int, group: int | None, mark: bytes) -> bool:
    """Sends each process the signal once; whether there was one."""
    sent = False
    if group is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            sent = True
    for pid in _marked(mark):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) != group:
                os.kill(pid, number)
                sent = True
    return sent


def _is_alive(group: int | None, mark: bytes) -> bool:
    """Whether a process is left. Dead ones that nobody waits for have no environment any more."""
    return bool(_marked(mark)) if _PROC.is_dir() else _send(0, group, mark)


def _marked(mark: bytes) -> list[int]:
    """The processes whose environment holds the mark; none where environments are not shown."""
    found = []
    for directory in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # another user's, or ended meanwhile
            if mark in (directory / "environ").read_bytes():
                found.append(int(directory.name))
    return found
