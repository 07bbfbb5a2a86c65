"""Execution of one agent program.

Output is kept within bounds and never blocks the program. No process that it started outlives it.
The caller may be cancelled at any time.

A supervisor (`supervisor.py`) runs between this process and each program. It kills the program's
descendants when the program exits. It kills the program too when it exceeds a limit, or when this
process asks or is gone.
"""

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lightning_jax.system.child_process import ChildProcess, kill_group

log = logging.getLogger(__name__)

MAX_OUTPUT = 2**20  # last bytes of standard output to keep
MAX_ERRORS = 2**16  # last bytes of standard error to keep
END_S = 15.0  # wait for a supervisor to end its program, which takes it at most 7 s
SUPERVISOR = Path(__file__).with_name("supervisor.py")
_CHUNK = 2**16


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program, including all processes it starts. 0: no limit."""

    max_processes: int = 0
    memory_bytes: int = 0
    num_files: int = 0  # soft limit of open files at the start of each process


@dataclass(frozen=True)
class ProgramEnd:
    """Exit of a program and the end of its output."""

    status: int  # exit status, or minus the signal number if a signal killed it
    output: str
    errors: str
    exceeded: str | None = None  # field of AgentConfig whose limit it exceeded


async def run_program(
    words: Sequence[str],
    environment: Mapping[str, str],
    stdin: bytes,
    keep_open: Sequence[int] = (),
    limits: ProgramLimits = ProgramLimits(),
    directory: str | None = None,
) -> ProgramEnd:
    """Run a command line to its end, then kill all processes it left behind.

    `keep_open` lists file descriptors that the program inherits. `directory` is where it starts, by
    default this process's own. If cancelled, end the program and all processes it started with
    SIGTERM, then SIGKILL after a grace period. Raises OSError if it cannot be started.
    """
    received = bytearray()  # lines that `supervisor.py` defines
    with (
        tempfile.TemporaryFile() as task,
        closing(_Tail(MAX_OUTPUT)) as output,
        closing(_Tail(MAX_ERRORS)) as errors,
    ):
        task.write(stdin)  # a file, because an unread pipe would fill up
        task.seek(0)
        numbers = (task.fileno(), *vars(limits).values())
        supervisor = ChildProcess(
            ["-I", "-S", str(SUPERVISOR), *map(str, numbers), *words],
            stdout=output.writer,
            stderr=errors.writer,
            env=environment,
            pass_fds=(task.fileno(), *keep_open),
            cwd=directory,
            end_s=END_S,
        )
        try:
            output.start()
            errors.start()
            supervisor.socket.setblocking(False)
            loop = asyncio.get_running_loop()
            while chunk := await loop.sock_recv(supervisor.socket, 4096):
                received += chunk
        finally:
            status = await supervisor.end_async()
            values = dict(line.split() for line in received.decode().splitlines())
            if status and "started" in values:  # the program stopped or killed its supervisor
                kill_group(int(values["started"]))
        if "errno" in values:
            number = int(values["errno"])
            raise OSError(number, os.strerror(number), words[0])
        status = int(values.get("exit", -signal.SIGKILL))
        return ProgramEnd(
            status, output.finish(words[0]), errors.finish(words[0]), values.get("over")
        )


class _Tail:
    """Reading end of a pipe that keeps the last bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_dropped = 0
        self._kept = bytearray()
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Start reading. Call this once the program holds the writing end."""
        self._close_writer()
        self._loop.add_reader(self._reader, self._read)

    def finish(self, program: str) -> str:
        """Read the rest of the pipe and return the kept text.

        No process should write to it now.
        """
        for _ in range(2**20 // _CHUNK):  # one full pipe at most, even if a process still writes
            if not self._read():
                break
        if self.num_dropped:
            log.warning(
                "the output of %s is too long; dropped the first %d bytes and kept the last %d",
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
        """Read once. Return True if there was data."""
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
