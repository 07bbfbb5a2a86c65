"""Processes that end with this one."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

END_S = 5.0  # from the end of a child's standard input to SIGKILL


class ChildProcess:
    """Process of a Python script. Its standard input is a socket to this process.

    The script must exit when the socket closes. The system closes it if this process is killed.
    `options` are those of `subprocess.Popen`. Raises OSError if the process cannot be started.
    """

    def __init__(self, words: Sequence[str], *, end_s: float = END_S, **options: Any) -> None:
        self.socket, theirs = socket.socketpair()
        self._end_s = end_s
        try:
            with theirs:
                self.popen = subprocess.Popen(
                    [sys.executable, *words],
                    stdin=theirs.fileno(),
                    start_new_session=True,  # Ctrl-C goes to this process, which then ends it
                    **options,
                )
        except BaseException:
            self.socket.close()
            raise

    def end(self) -> int:
        """Close the socket, wait for the process, and return its exit status.

        After `end_s`, kill the process and all others of its group.
        """
        for pause_s in self._pauses():
            time.sleep(pause_s)
        return self.popen.returncode

    async def end_async(self) -> int:
        """Do the same without blocking the event loop."""
        for pause_s in self._pauses():
            await asyncio.sleep(pause_s)
        return self.popen.returncode

    def _pauses(self) -> Iterator[float]:
        self.socket.close()
        self.popen.send_signal(signal.SIGCONT)  # in case that it was stopped
        give_up, pause_s = time.monotonic() + self._end_s, 0.002
        while self.popen.poll() is None:
            if time.monotonic() > give_up:
                kill_group(self.popen.pid)
            yield pause_s
            pause_s = min(1.5 * pause_s, 0.05)


def kill_group(pid: int) -> None:
    """Kill the process group of this id, if there is one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
