"""Handles of the processes that follow grammars; grammar_child.py is what runs there. No JAX."""

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.serve.grammar_child import LENGTH, WALL_FACTOR
from lightning_jax.types import InvalidValue

CHILD = Path(__file__).with_name("grammar_child.py")
END_TIMEOUT_S = 5.0


class GrammarError(InvalidValue):
    """A grammar or JSON schema that cannot be followed.

    `reason` is "invalid", or "size", "time", "memory" or "crash" if it passed a limit. While it is
    followed, it is also "token_does_not_fit", "dead_end" or "unfinished".
    """

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message, reason=reason)


class GrammarProcessLost(RuntimeError):
    """The processes of grammars ended for no reason that lies in a grammar."""


@dataclass(frozen=True)
class GrammarLimits:
    """Bounds of one grammar; `ServeConfig` has the defaults and says what they mean."""

    timeout_s: float = 2.0
    memory_mib: float = 512.0
    max_kib: int = 256


class GrammarProcess:
    """One grammar's process. Every method may be called from any thread."""

    def __init__(self, connection: socket.socket, limits: GrammarLimits) -> None:
        self._connection, self._limits = connection, limits
        self._lock = threading.Lock()
        self._why: GrammarError | GrammarProcessLost | None = None
        weakref.finalize(self, connection.close)  # which ends the process

    def open(self) -> socket.socket:
        """Return a socket on which the process answers one response, first with its first mask.

        Raises OSError if this process has no descriptor left.
        """
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(ConnectionError):  # if it has ended, reading tells
            socket.send_fds(self._connection, [b"r"], [theirs.fileno()])
        return ours

    @property
    def alive(self) -> bool:
        """Whether the process has not ended, as far as the system knows."""
        return self._why is None and not wait_readable([self._connection.fileno()], 0.0)

    def why(self) -> GrammarError | GrammarProcessLost:
        """Return why the process has ended. Wait for that if it is still alive."""
        with self._lock:
            if self._why is None:
                self._why = self._ask()
            return self._why

    def _ask(self) -> GrammarError | GrammarProcessLost:
        self._connection.settimeout(END_TIMEOUT_S)
        said = b""
        with contextlib.suppress(OSError):
            said = self._connection.recv(1)
        if not said:
            return GrammarProcessLost("the process of a grammar was lost; send the call again.")
        limits = self._limits
        match said[0]:
            case signal.SIGPROF | signal.SIGALRM:
                reason = "time"
                bound = f"serve.grammar_timeout_s allows {limits.timeout_s:g} s of CPU time"
            case signal.SIGABRT | signal.SIGKILL:
                reason = "memory"
                bound = f"serve.grammar_memory_mib allows {limits.memory_mib:g} MiB"
            case number:
                reason = "crash"
                bound = f"it ended the grammar library by signal {number}"
        return GrammarError(f"the grammar is too complex: {bound}. Simplify the schema.", reason)


class GrammarServer:
    """The fork server of one tokenizer. It starts with the first grammar, and again if lost."""

    def __init__(self, tokenizer: Tokenizer, end_of_turn_id: int, limits: GrammarLimits) -> None:
        self._limits = limits
        self._tokenizer, self._end_of_turn_id = tokenizer, end_of_turn_id
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The fork server's process id, None before the first grammar."""
        return self._process.pid if self._process else None

    def start(self, grammar: str) -> GrammarProcess:
        """Start a process for the grammar. Raises GrammarProcessLost if that fails twice."""
        message = grammar.encode()
        for _ in range(2):
            ours, theirs = socket.socketpair()
            with theirs, self._lock:
                control = self._control or self._launch()
                try:
                    _send(control, message, theirs)
                    return GrammarProcess(ours, self._limits)
                except ConnectionError:
                    ours.close()
                    self._control = None
                    if self._end:
                        self._end()
        raise GrammarProcessLost("the processes of grammars do not start; see the server's log.")

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: modules beside the script must not stand in for others of the same name.
            process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server, which then ends it
            )
        self._control, self._process = ours, process
        self._end = weakref.finalize(self, _end, process, ours)
        self.starts += 1
        settings = {
            "tokenizer": self._tokenizer.to_json(),
            "end_of_turn_id": self._end_of_turn_id,
            "special_ids": sorted(self._tokenizer.special_ids),
            "timeout_s": self._limits.timeout_s,
            "memory_mib": self._limits.memory_mib,
        }
        with contextlib.suppress(ConnectionError):  # the caller's own message tells
            _send(ours, json.dumps(settings).encode())
        return ours


def _send(control: socket.socket, message: bytes, passed: socket.socket | None = None) -> None:
    header = LENGTH.pack(len(message))
    if passed is None:
        control.sendall(header)
    else:
        socket.send_fds(control, [header], [passed.fileno()])
    control.sendall(message)


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Close the control socket, and kill the process if that does not end it."""
    control.close()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Replies:
    """One response's socket: token ids go out, and a reply comes back for each."""

    def __init__(self, process: GrammarProcess, patience_s: float) -> None:
        self._process, self._connection = process, process.open()
        self._connection.setblocking(False)
        self._received = bytearray()
        self._patience_s = patience_s
        self._deadline = time.monotonic() + patience_s  # of the next reply
        weakref.finalize(self, self._connection.close)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, token_id: int) -> None:
        """Ask for the mask after this token."""
        self._deadline = time.monotonic() + self._patience_s
        with contextlib.suppress(ConnectionError):  # reading tells
            self._connection.send(LENGTH.pack(token_id))

    def receive(self, timeout_s: float | None = 0.0) -> bytes | None:
        """Return the next reply, or None if it takes longer; without a time-out wait for it.

        Raises GrammarError or GrammarProcessLost if the process has ended, GrammarProcessLost if
        the reply is overdue.
        """
        until = self._deadline if timeout_s is None else time.monotonic() + timeout_s
        while True:
            held = self._received
            if len(held) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(held)
                if len(held) >= LENGTH.size + length:
                    self._received = held[LENGTH.size + length :]
                    return bytes(held[LENGTH.size : LENGTH.size + length])
            if not wait_readable([self.fileno()], until - time.monotonic()):
                if timeout_s is None or time.monotonic() >= self._deadline:
                    raise GrammarProcessLost("the process of a grammar does not answer.")
                return None
            try:
                part = self._connection.recv(2**16)
            except ConnectionError:
                part = b""
            if not part:
                raise self._process.why()
            held += part

    def close(self) -> None:
        self._connection.close()


def wait_readable(descriptors: Sequence[int], timeout_s: float) -> bool:
    """Wait until one of the descriptors can be read; False if the time was over before."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def patience_s(limits: GrammarLimits) -> float:
    """Return the seconds after which a process that has a time limit must have ended."""
    return WALL_FACTOR * limits.timeout_s + END_TIMEOUT_S
