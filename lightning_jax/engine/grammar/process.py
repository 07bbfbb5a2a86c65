"""Handles of the grammar processes, which run child.py, and of the responses in them. No JAX."""

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
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.grammar.child import FAILED, FORCED, LENGTH
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


class GrammarProcess:
    """Handle of one grammar's process. Every method may be called from any thread."""

    def __init__(self, connection: socket.socket, serve: ServeConfig) -> None:
        self._connection, self._serve = connection, serve
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
        match report[0]:
            case signal.SIGPROF:
                reason = "time"
                allowed_s = self._serve.grammar_timeout_s
                bound = f"serve.grammar_timeout_s allows {allowed_s:g} s of CPU time"
            case signal.SIGABRT:
                reason = "memory"
                bound = f"serve.grammar_memory_mib allows {self._serve.grammar_memory_mib:g} MiB"
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

    def __init__(self, tokenizer: Tokenizer, end_of_turn_id: int, serve: ServeConfig) -> None:
        self._serve = serve
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
                    return GrammarProcess(ours, self._serve)
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
            "timeout_s": self._serve.grammar_timeout_s,
            "memory_mib": self._serve.grammar_memory_mib,
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


class Matcher:
    """Position of one response in its grammar. Not thread-safe.

    Its socket to the grammar's process sends the sampled token ids, and receives a mask for each.
    A mask that takes more than `patience_s` is lost.
    """

    def __init__(self, process: GrammarProcess, vocab_size: int, patience_s: float) -> None:
        self._process, self._connection = process, process.open()
        self._connection.setblocking(False)
        weakref.finalize(self, self._connection.close)
        self._vocab_size, self._patience_s = vocab_size, patience_s
        self._deadline = time.monotonic() + patience_s  # for the next reply
        self._buffer = bytearray()
        self._packed: UInt8[np.ndarray, " V8"] | None = None  # of the next token, once known
        self._forced: int | None = None
        self._error: GrammarError | GrammarProcessLost | None = None

    def packed(self) -> UInt8[np.ndarray, " V8"]:
        """Return the packed mask of the next token: 8 tokens a byte, lowest bit first.

        If the grammar fixes the next text, only the token that the tokenizer would use is allowed.
        Blocks until the mask arrives. Raises GrammarError if the grammar allows no token or is too
        complex, and GrammarProcessLost if its process was lost or the mask is overdue.
        """
        self._receive(None)
        assert self._packed is not None, "without a timeout there is always a reply"
        return self._packed

    def poll(self) -> None:
        """Take the mask of the next token if it has arrived. Raises the errors of `packed`."""
        self._receive(0.0)

    @property
    def has_mask(self) -> bool:
        """True if the mask of the next token has arrived."""
        return self._packed is not None

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when the next mask arrives."""
        return self._connection.fileno()

    @property
    def forced(self) -> int | None:
        """Only token that is allowed, or None if there is a choice.

        Raises the errors of `packed`.
        """
        self.packed()
        return self._forced

    def push(self, token_id: int) -> None:
        """Advance by a sampled token.

        The next mask raises GrammarError if the token is not allowed.
        """
        self.packed()
        self._packed = self._forced = None
        self._deadline = time.monotonic() + self._patience_s
        with contextlib.suppress(ConnectionError):  # the next read fails
            self._connection.send(LENGTH.pack(token_id))

    def close(self) -> None:
        """Release this response's matcher in the grammar process."""
        self._connection.close()

    def _receive(self, timeout_s: float | None) -> None:
        """Take the reply if it arrives in time. An error is raised again on every later call."""
        if self._error is not None:
            raise copy.copy(self._error)
        if self._packed is None:
            try:
                reply = self._read(timeout_s)
                if reply is not None:
                    self._take(reply)
            except (GrammarError, GrammarProcessLost) as error:
                self._error = copy.copy(error)  # without a traceback that refers to this matcher
                raise

    def _read(self, timeout_s: float | None) -> bytes | None:
        """Return the next reply, or None on a timeout. With `timeout_s=None`, wait for it."""
        until = self._deadline if timeout_s is None else time.monotonic() + timeout_s
        while True:
            buffer = self._buffer
            if len(buffer) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(buffer)
                if len(buffer) >= LENGTH.size + length:
                    self._buffer = buffer[LENGTH.size + length :]
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

    def _take(self, reply: bytes) -> None:
        kind, body = reply[:1], reply[1:]
        if kind == FAILED:
            reason, _, message = body.decode("utf-8", "replace").partition("\n")
            raise GrammarError(message, reason)
        packed = np.zeros((self._vocab_size + 7) // 8, np.uint8)
        if kind == FORCED:
            (token_id,) = LENGTH.unpack(body)
            if token_id < self._vocab_size:
                packed[token_id // 8] = 1 << token_id % 8
        else:
            mask = np.frombuffer(body, np.uint8)[: len(packed)]
            packed[: len(mask)] = mask
            packed[-1] &= 0xFF >> -self._vocab_size % 8
        token_ids = np.flatnonzero(packed)
        if not len(token_ids):
            raise GrammarError(
                "the grammar has reached a dead end: no token is allowed next. Simplify it so that "
                "every prefix can be completed.",
                "dead_end",
            )
        byte = int(packed[token_ids[0]])
        only = len(token_ids) == 1 and byte & (byte - 1) == 0
        self._forced = 8 * int(token_ids[0]) + byte.bit_length() - 1 if only else None
        self._packed = packed


def wait_readable(descriptors: Sequence[int], timeout_s: float) -> bool:
    """Wait until one of the descriptors is readable. Return False on a timeout."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
