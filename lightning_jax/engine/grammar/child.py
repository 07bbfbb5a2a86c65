"""Fork server for grammars: one process per grammar, with limits on time and memory.

`process.py` runs this file as a script. A schema written by an agent can crash llguidance
or make it allocate gigabytes, so llguidance runs only in these processes. The script imports no
module of the package, because most of them import JAX.

Standard input is the control socket. Its first message holds the settings. Each later message holds
a grammar and a socket for that grammar's process. The server forks, and the child compiles the
grammar. The child then receives a socket for each response. It sends the first mask on that socket,
and another mask after each token.
"""

import contextlib
import json
import os
import re
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llguidance
import tokenizers

LENGTH = struct.Struct("<I")  # of a message length or a token id
MASK, FORCED, FAILED = b"m", b"f", b"e"  # first byte of a reply
TOKEN_SECONDS = 0.01  # CPU time of each mask that does not count against the response
WALL_FACTOR = 20.0  # wall-clock seconds per second of CPU time, on a busy machine


class Vocabulary:
    """Tokenizer in the form that llguidance expects of an external one.

    llguidance can read the tokenizer's JSON itself. It would then tokenize "<|im_end|>" in fixed
    text as the special token, which its own grammar rejects.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._plain = tokenizers.Tokenizer.from_str(settings["tokenizer"])
        self._plain.encode_special_tokens = True
        self._from_json = llguidance.LLTokenizer(
            settings["tokenizer"], eos_token=settings["end_of_turn_id"]
        )
        self.tokens = [
            self._from_json.decode_bytes([token_id])
            for token_id in range(self._from_json.vocab_size)
        ]
        self.special_token_ids = settings["special_ids"]
        self.eos_token_id, self.bos_token_id = settings["end_of_turn_id"], None

    def __call__(self, text: str) -> list[int]:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if b"".join(self.tokens[token_id] for token_id in ids) == text.encode():
            return ids
        # The tokenizer changes the text, for example by adding a space before the first word.
        return self._from_json.greedy_tokenize(text)


def make_tables(settings: dict[str, Any]) -> llguidance.LLTokenizer | str:
    """Return llguidance's tables for the vocabulary, or a message if it cannot build them."""
    try:
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary(settings)))
    except ValueError as error:
        return (
            f"this model's tokenizer cannot be used with a grammar: {brief(str(error))}; use a "
            "model with a byte-level or byte-fallback tokenizer"
        )


def brief(message: str) -> str:
    """Return llguidance's message on one line, without the position, the text and the state."""
    message = re.split(r"\n<state>|\n\s*\d+ \| ", message)[0]
    message = re.sub(r"^at \d+\(\d+\): ", "", message)
    message = re.sub(r"(regex parse error):.*\nerror: ", r"\1: ", message, flags=re.DOTALL)
    return " ".join(message.split()).rstrip(".")[:300]


def next_reply(matcher: llguidance.LLMatcher) -> bytes:
    """Return a reply with the tokens that may come next."""
    ahead = matcher.compute_ff_tokens()  # never includes a forced end of turn
    mask = b"" if ahead else matcher.compute_bitmask()
    if matcher.is_error():
        return failed(
            f"the grammar has reached a dead end: {brief(matcher.get_error())}; simplify it so "
            "that every prefix can be completed",
            "dead_end",
        )
    return FORCED + LENGTH.pack(ahead[0]) if ahead else MASK + mask


def push(matcher: llguidance.LLMatcher, token_id: int) -> bytes:
    """Consume a sampled token, and return the reply for the next one."""
    if matcher.consume_token(token_id):
        return next_reply(matcher)
    return failed(
        f"the grammar does not allow token {token_id}: {brief(matcher.get_error())}; pass only "
        "tokens that the mask allows",
        "token_does_not_fit",
    )


def failed(message: str, reason: str = "invalid") -> bytes:
    """Return the reply that ends a response: a reason and, on the next line, what happened."""
    return FAILED + f"{reason}\n{message}".encode("utf-8", "replace")


def limited(seconds: float, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work`. The kernel ends this process if the call takes more than `seconds` of CPU time.

    The signals keep their default action, which ends a process even inside native code.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)
    try:
        return work(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def limit_memory(mib: float) -> None:
    """Limit this process to `mib` MiB above its current memory. Linux only."""
    if sys.platform != "linux":
        return  # macOS does not enforce the limit
    with open("/proc/self/statm", encoding="ascii") as file:
        num_bytes = int(file.read().split()[0]) * resource.getpagesize()
    most = num_bytes + int(mib * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


@dataclass
class MatchedResponse:
    """Matcher of one response, or None if the grammar failed, and the CPU seconds left."""

    matcher: llguidance.LLMatcher | None
    seconds_left: float

    def push(self, token_id: int) -> bytes:
        """Consume a sampled token, and return the reply for the next one.

        The engine waits for each mask, so all masks of a response share one time budget.
        """
        assert self.matcher is not None, "a failed response samples nothing"
        start = time.process_time()
        reply = push(self.matcher, token_id)
        self.seconds_left -= time.process_time() - start - TOKEN_SECONDS
        if self.seconds_left < 0:
            return failed(
                "the masks of this response took longer than serve.grammar_timeout_s", "time"
            )
        return reply


class CompiledGrammar:
    """Grammar of this process, compiled, with a matcher for each open response."""

    def __init__(self, connection: socket.socket, grammar: str, settings: dict[str, Any]) -> None:
        self._connection, self._grammar = connection, grammar
        self._seconds = settings["timeout_s"]
        self._compiled: llguidance.LLMatcher | None = None
        self._first = b""  # first reply to every response
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, None)

    def run(self, tables: llguidance.LLTokenizer | str) -> None:
        """Compile the grammar, then answer until the server closes the socket."""
        if isinstance(tables, str):
            self._first = failed(tables)
        else:
            limited(self._seconds, self._compile, tables)
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._answer(key.fileobj, key.data)  # type: ignore[arg-type]
                elif not self._adopt():
                    return

    def _compile(self, tables: llguidance.LLTokenizer) -> None:
        compiled = llguidance.LLMatcher(tables, self._grammar, log_level=0)
        if compiled.is_error():
            self._first = failed(
                f"the grammar does not compile: {brief(compiled.get_error())}; use only what "
                "llguidance supports in a grammar or JSON schema"
            )
        else:
            self._compiled, self._first = compiled, next_reply(compiled)

    def _adopt(self) -> bool:
        """Accept the socket of a new response and send the first mask.

        Return False if the server closed.
        """
        message, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        if not message:
            return False
        response = socket.socket(fileno=descriptors[0])
        matcher = self._compiled and limited(self._seconds, self._compiled.deep_copy)
        self._selector.register(
            response, selectors.EVENT_READ, MatchedResponse(matcher, self._seconds)
        )
        self._reply(response, self._first)
        return True

    def _answer(self, connection: socket.socket, response: MatchedResponse) -> None:
        message = receive(connection, LENGTH.size)
        if message is None:
            self._forget(connection)
        else:
            (token_id,) = LENGTH.unpack(message)
            self._reply(connection, limited(self._seconds, response.push, token_id))

    def _reply(self, response: socket.socket, reply: bytes) -> None:
        try:
            response.sendall(LENGTH.pack(len(reply)) + reply)
        except OSError:
            self._forget(response)  # its request has ended

    def _forget(self, response: socket.socket) -> None:
        self._selector.unregister(response)
        response.close()


def receive(connection: socket.socket, length: int) -> bytes | None:
    """Return `length` bytes, or None if the other side closed the connection."""
    parts = bytearray()
    while len(parts) < length:
        try:
            part = connection.recv(length - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def receive_message(control: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return a length-prefixed message and the file descriptors sent with it, or None if closed."""
    header, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, 1)
    rest = receive(control, LENGTH.size - len(header)) if header else None
    if rest is None:
        return None
    message = receive(control, *LENGTH.unpack(header + rest))
    return None if message is None else (message, list(descriptors))


class ForkServer:
    """Process that forks one child per grammar and reports on the child's socket how it ended."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control, self._settings = control, settings
        self._tables = make_tables(settings)
        self._children: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, wake = socket.socketpair()
        wake.setblocking(False)
        self._woken.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def run(self) -> None:
        """Fork for each message until the control socket closes."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                    self._reap()
                    continue
                message = receive_message(self._control)
                if message is None:
                    signal.set_wakeup_fd(-1)  # children may end after its socket is closed
                    return
                self._fork(message[0].decode(), socket.socket(fileno=message[1][0]))

    def _fork(self, grammar: str, connection: socket.socket) -> None:
        pid = os.fork()
        if pid:
            self._children[pid] = connection
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide llguidance's crash messages
            self._selector.close()
            for inherited in (self._control, self._woken, self._wake, *self._children.values()):
                inherited.close()
            limit_memory(self._settings["memory_mib"])
            CompiledGrammar(connection, grammar, self._settings).run(self._tables)
        except MemoryError:
            os.abort()  # llguidance also aborts when memory runs out
        finally:
            os._exit(0)

    def _reap(self) -> None:
        """Send each ended child's signal number on its socket, or 0 if it exited normally."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self._children.pop(pid)
            with contextlib.suppress(OSError):
                connection.sendall(bytes([os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0]))
            connection.close()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # out of memory, the kernel kills these before the trainer
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # children must not hold the control socket
    message = receive_message(control)
    if message is not None:
        ForkServer(control, json.loads(message[0])).run()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(1)
