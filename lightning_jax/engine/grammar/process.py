"""Handles of the grammar processes, which run child.py. No JAX."""

import contextlib
import copy
import json
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_jax.engine.grammar.child import LENGTH, WALL_FACTOR
from lightning_jax.errors import InvalidValue
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.system.child_process import END_S, ChildProcess

# Signals of a fault in the process itself.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
CHILD = Path(__file__).with_name("child.py")


class GrammarError(InvalidValue):
    """Grammar or JSON schema that cannot be used.

    `reason` is "invalid", or "size", "time", "memory" or "crash" if it exceeded a limit. During a
    response it may also be "token_does_not_fit", "dead_end" or "unfinished".
    """

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message, reason=reason)


class GrammarProcessLost(RuntimeError):
    """Loss of a grammar process for a reason other than its grammar."""


@dataclass(frozen=True)
class GrammarLimits:
    """Limits for one grammar. `ServeConfig` documents them and has the defaults."""

    timeout_s: float = 2.0
    memory_mib: float = 512.0
    max_kib: int = 256


class GrammarProcess:
    """Handle of one grammar's process. Every method may be called from any thread."""

    def __init__(self, connection: socket.socket, limits: GrammarLimits) -> None:
        self._connection, self._limits = connection, limits
        self._lock = threading.Lock()
        self._why: GrammarError | GrammarProcessLost | None = None
        weakref.finalize(self, connection.close)  # which ends the process

    def open(self) -> socket.socket:
        """Return a socket for one response, on which the process first sends the first mask.

        Raises OSError if this process has no file descriptor left.
        """
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(ConnectionError):  # if it has ended, the next read fails
            socket.send_fds(self._connection, [b"r"], [theirs.fileno()])
        return ours

    @property
    def alive(self) -> bool:
        """True if the process has not reported its end."""
        return self._why is None and not wait_readable([self._connection.fileno()], 0.0)

    def why(self) -> GrammarError | GrammarProcessLost:
        """Return the error that ended the process. Waits for it if the process is still alive."""
        with self._lock:
            if self._why is None:
                self._why = self._ask()
            return self._why

    def _ask(self) -> GrammarError | GrammarProcessLost:
        self._connection.settimeout(END_S)
        report = b""
        with contextlib.suppress(OSError):
            report = self._connection.recv(1)
        if not report:
            return GrammarProcessLost("the grammar's process was lost; send the call again")
        limits = self._limits
        match report[0]:
            case signal.SIGPROF:
                reason = "time"
                bound = f"serve.grammar_timeout_s allows {limits.timeout_s:g} s of CPU time"
            case signal.SIGABRT:
                reason = "memory"
                bound = f"serve.grammar_memory_mib allows {limits.memory_mib:g} MiB"
            case number if number in CRASHES:
                reason = "crash"
                bound = f"the grammar library ended with signal {number}"
            case signal.SIGALRM:
                return GrammarProcessLost(
                    "the machine was too busy for the grammar's process; send the call again"
                )
            case number:  # SIGKILL is the kernel's, when the machine's memory runs out
                return GrammarProcessLost(
                    f"signal {number} ended the grammar's process; send the call again"
                )
        return GrammarError(f"the grammar is too complex: {bound}. Simplify the schema.", reason)


class GrammarServer:
    """Fork server of one tokenizer. It starts at the first grammar, and again if it was lost."""

    def __init__(self, tokenizer: Tokenizer, end_of_turn_id: int, limits: GrammarLimits) -> None:
        self._limits = limits
        self._tokenizer, self._end_of_turn_id = tokenizer, end_of_turn_id
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None  # None: not started, or lost

    @property
    def pid(self) -> int | None:
        """Process id of the fork server, or None before the first grammar."""
        return self._child.popen.pid if self._child else None

    def start(self, grammar: str) -> GrammarProcess:
        """Start a process for the grammar. Raises GrammarProcessLost if that fails twice."""
        message = grammar.encode()
        for _ in range(2):
            ours, theirs = socket.socketpair()
            with theirs, self._lock:
                child = self._child = self._child or self._launch()
                try:
                    _send(child.socket, message, theirs)
                    return GrammarProcess(ours, self._limits)
                except ConnectionError:
                    ours.close()
                    self._child = None
                    child.end()
        raise GrammarProcessLost("the grammar processes do not start; see the server's log")

    def _launch(self) -> ChildProcess:
        # -P: modules next to the script must not shadow others of the same name.
        child = ChildProcess(["-P", str(CHILD)], stdout=subprocess.DEVNULL)
        weakref.finalize(self, child.end)
        settings = {
            "tokenizer": self._tokenizer.to_json(),
            "end_of_turn_id": self._end_of_turn_id,
            "special_ids": sorted(self._tokenizer.special_ids),
            "timeout_s": self._limits.timeout_s,
            "memory_mib": self._limits.memory_mib,
        }
        with contextlib.suppress(ConnectionError):  # sending the grammar then fails, too
            _send(child.socket, json.dumps(settings).encode())
        return child


def _send(control: socket.socket, message: bytes, passed: socket.socket | None = None) -> None:
    header = LENGTH.pack(len(message))
    if passed is None:
        control.sendall(header)
    else:
        socket.send_fds(control, [header], [passed.fileno()])
    control.sendall(message)


class Replies:
    """Socket of one response: sends token ids and receives one reply for each."""

    def __init__(self, process: GrammarProcess, patience_s: float) -> None:
        self._process, self._connection = process, process.open()
        self._connection.setblocking(False)
        self._received = bytearray()
        self._patience_s = patience_s
        self._deadline = time.monotonic() + patience_s  # for the next reply
        weakref.finalize(self, self._connection.close)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, token_id: int) -> None:
        """Request the mask after this token."""
        self._deadline = time.monotonic() + self._patience_s
        with contextlib.suppress(ConnectionError):  # the next read fails
            self._connection.send(LENGTH.pack(token_id))

    def receive(self, timeout_s: float | None = 0.0) -> bytes | None:
        """Return the next reply, or None on a timeout. With `timeout_s=None`, wait for it.

        Raises GrammarError or GrammarProcessLost if the process has ended, and GrammarProcessLost
        if the reply is overdue.
        """
        until = self._deadline if timeout_s is None else time.monotonic() + timeout_s
        while True:
            buffer = self._received
            if len(buffer) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(buffer)
                if len(buffer) >= LENGTH.size + length:
                    self._received = buffer[LENGTH.size + length :]
                    return bytes(buffer[LENGTH.size : LENGTH.size + length])
            if not wait_readable([self.fileno()], until - time.monotonic()):
                if timeout_s is None or time.monotonic() >= self._deadline:
                    raise GrammarProcessLost("the grammar's process does not respond")
                return None
            try:
                part = self._connection.recv(2**16)
            except ConnectionError:
                part = b""
            if not part:
                raise copy.copy(self._process.why())
            buffer += part

    def close(self) -> None:
        self._connection.close()


def wait_readable(descriptors: Sequence[int], timeout_s: float) -> bool:
    """Wait until one of the descriptors is readable. Return False on a timeout."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def patience_s(limits: GrammarLimits) -> float:
    """Return the number of seconds to wait for a process before it counts as lost."""
    return WALL_FACTOR * limits.timeout_s + END_S
