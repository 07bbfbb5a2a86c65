"""Runs a program to its end, under three promises: what it prints is kept within bounds and never
blocks it, nothing it started outlives it, and whoever waits for it may be cancelled.

A supervisor (`supervisor.py`) stands between this process and each program. It ends the program and
its descendants when the program ends, when it is over a limit, and when this process wants it or is
gone itself.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

MAX_OUTPUT = 2**20  # bytes of its standard output that are kept: the last ones
MAX_ERRORS = 2**16  # and of its standard error
END_S = 15.0  # for a supervisor to end its program, of which it takes 7 s at most
SUPERVISOR = Path(__file__).with_name("supervisor.py")
_CHUNK = 2**16


@dataclass(frozen=True)
class Limits:
    """What one program may use with all that it started. 0: no limit."""

    max_processes: int = 0
    memory_bytes: int = 0
    num_files: int = 0  # the soft limit of open files that each of its processes begins with


@dataclass(frozen=True)
class Ended:
    """How a program ended, and the end of what it printed."""

    status: int  # its exit status; minus the signal's number where one killed it
    output: str
    errors: str
    exceeded: str | None = None  # the field of AgentConfig over which it was ended


async def run_program(
    words: Sequence[str],
    environment: Mapping[str, str],
    stdin: bytes,
    keep_open: Sequence[int] = (),
    limits: Limits = Limits(),
) -> Ended:
    """Runs a command line to its end, then ends whatever it left behind.

    `keep_open` names file descriptors that the program inherits. Cancelled, it ends the program and
    all that it started: SIGTERM, and SIGKILL after a grace. Raises OSError if it cannot be started.
    """
    ours, theirs = socket.socketpair()
    received = bytearray()
    with (
        ours,
        tempfile.TemporaryFile() as task,
        _tail(MAX_OUTPUT) as output,
        _tail(MAX_ERRORS) as errors,
    ):
        with theirs:
            task.write(stdin)  # a file, because a program that never reads it would fill a pipe
            task.seek(0)
            numbers = (theirs.fileno(), *vars(limits).values())
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", SUPERVISOR, *map(str, numbers), *words],
                stdin=task,
                stdout=output.writer,
                stderr=errors.writer,
                env=environment,
                pass_fds=(theirs.fileno(), *keep_open),
                start_new_session=True,
            )
        try:
            output.start()
            errors.start()
            await _receive(ours, received)
        finally:
            ours.close()  # which has the supervisor end what still runs
            await _end(process, received)
        told = _told(received)
        if "errno" in told:
            number = int(told["errno"])
            raise OSError(number, os.strerror(number), words[0])
        status = int(told.get("exit", -signal.SIGKILL))
        return Ended(status, output.finish(words[0]), errors.finish(words[0]), told.get("over"))


async def _receive(supervisor: socket.socket, received: bytearray) -> None:
    """Add to `received` what a supervisor tells until it ends."""
    supervisor.setblocking(False)
    while chunk := await asyncio.get_running_loop().sock_recv(supervisor, 4096):
        received += chunk


def _told(received: bytes | bytearray) -> dict[str, str]:
    """Return the values of the lines that `supervisor.py` describes, by their first words."""
    return dict(line.split() for line in received.decode().splitlines())


async def _end(process: subprocess.Popen[bytes], received: bytearray) -> None:
    """Wait for a supervisor to end. If its program stopped or killed it, end that one's group."""
    process.send_signal(signal.SIGCONT)
    give_up, pause_s = time.monotonic() + END_S, 0.002
    while process.poll() is None:
        if time.monotonic() > give_up:
            process.kill()
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
    if process.returncode:
        with suppress(KeyError, ProcessLookupError, PermissionError):
            os.killpg(int(_told(received)["started"]), signal.SIGKILL)


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
                extra={"event": "output_cut", "num_dropped": self.num_dropped},
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
