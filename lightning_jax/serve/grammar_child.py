"""Fork server for grammars: one process for each grammar, with limits of time and memory.

`grammar_process.py` runs this file as a script. A schema that an agent wrote can crash llguidance
or make it allocate gigabytes, so llguidance runs in these processes only. The script imports no
module of the package, because most of them import JAX.

Standard input is the control socket. Its first message holds the settings, and each later message
a grammar together with a socket for that grammar's process. The server forks, and the child
compiles the grammar. On its socket the child receives one more socket for each response, answers
there with the first mask, and then with a mask for each token.
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

LENGTH = struct.Struct("<I")  # also of a token id
MASK, FORCED, FAILED = b"m", b"f", b"e"  # how a reply begins
TOKEN_SECONDS = 0.01  # CPU time of a mask that a response does not pay for
WALL_FACTOR = 20.0  # wall-clock seconds for each second of CPU time, on a machine with other work


class Vocabulary:
    """The tokenizer in the shape that llguidance expects of a foreign one.

    llguidance can read the tokenizer's JSON by itself. It would then split fixed text as if
    "<|im_end|>" in it meant the special token, which its own grammar refuses.
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
        # The tokenizer changes the text, for example by a space before its first word.
        return self._from_json.greedy_tokenize(text)


def make_tables(settings: dict[str, Any]) -> llguidance.LLTokenizer | str:
    """Return llguidance's tables of the vocabulary, or why it has none."""
    try:
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary(settings)))
    except ValueError as error:
        return (
            f"this model's tokenizer cannot follow a grammar: {brief(str(error))}; expected a "
            "byte-level or byte-fallback one. Use another model."
        )


def brief(message: str) -> str:
    """Return llguidance's message on one line, without its position, the text and the state."""
    message = re.split(r"\n<state>|\n\s*\d+ \| ", message)[0]
    message = re.sub(r"^at \d+\(\d+\): ", "", message)
    message = re.sub(r"(regex parse error):.*\nerror: ", r"\1: ", message, flags=re.DOTALL)
    return " ".join(message.split()).rstrip(".")[:300]


def look(matcher: llguidance.LLMatcher) -> bytes:
    """Return the reply that says which tokens may come next."""
    ahead = matcher.compute_ff_tokens()  # does not say that the end of turn is forced
    mask = b"" if ahead else matcher.compute_bitmask()
    if matcher.is_error():
        return failed(
            f"the grammar cannot go on: {brief(matcher.get_error())}; expected a grammar that "
            "every text it begins can finish. Simplify it.",
            "dead_end",
        )
    stopped = bytes([matcher.is_stopped()])
    return FORCED + stopped + LENGTH.pack(ahead[0]) if ahead else MASK + stopped + mask


def push(matcher: llguidance.LLMatcher, token_id: int) -> bytes:
    """Take a sampled token, and return the reply for the token after it."""
    if matcher.consume_token(token_id):
        return look(matcher)
    return failed(
        f"token {token_id} does not fit the grammar: {brief(matcher.get_error())}; expected one "
        "that the mask allows.",
        "token_does_not_fit",
    )


def failed(message: str, reason: str = "invalid") -> bytes:
    """Return the reply that ends a response: a reason and, on the next line, what happened."""
    return FAILED + f"{reason}\n{message}".encode("utf-8", "replace")


def limited(seconds: float, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work`; the system ends this process if the call takes more CPU time.

    The signals keep their default action, which also ends a process inside of native code.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)
    try:
        return work(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def limit_memory(mib: float) -> None:
    """Let this process take so much memory beyond what it has; Linux only."""
    if sys.platform != "linux":
        return  # macOS does not enforce the limit
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    most = taken + int(mib * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


@dataclass
class Response:
    """One response's matcher, None if the grammar failed, and the CPU seconds that it may take."""

    matcher: llguidance.LLMatcher | None
    seconds_left: float

    def push(self, token_id: int) -> bytes:
        """Take a sampled token, and return the reply for the token after it.

        The engine waits for each mask, so all masks of a response share one allowance.
        """
        assert self.matcher is not None, "a failed response samples nothing"
        start = time.process_time()
        reply = push(self.matcher, token_id)
        self.seconds_left -= time.process_time() - start - TOKEN_SECONDS
        if self.seconds_left < 0:
            return failed(
                "the masks of this response take more than serve.grammar_timeout_s.", "time"
            )
        return reply


class GrammarProcess:
    """The process of one grammar: the compiled grammar and a matcher for each open response."""

    def __init__(self, connection: socket.socket, grammar: str, settings: dict[str, Any]) -> None:
        self._connection, self._grammar = connection, grammar
        self._seconds = settings["timeout_s"]
        self._compiled: llguidance.LLMatcher | None = None
        self._first = b""  # reply to every new response
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, None)

    def run(self, tables: llguidance.LLTokenizer | str) -> None:
        """Compile the grammar, and answer until the server closes the socket."""
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
                f"the grammar does not compile: {brief(compiled.get_error())}; expected a "
                "grammar or JSON schema that llguidance supports. Simplify it."
            )
        else:
            self._compiled, self._first = compiled, look(compiled)

    def _adopt(self) -> bool:
        """Take the socket of a new response, and answer with the first mask."""
        message, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        if not message:
            return False
        response = socket.socket(fileno=descriptors[0])
        matcher = self._compiled and limited(self._seconds, self._compiled.deep_copy)
        self._selector.register(response, selectors.EVENT_READ, Response(matcher, self._seconds))
        self._reply(response, self._first)
        return True

    def _answer(self, connection: socket.socket, response: Response) -> None:
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
    """Return so many bytes, or None if the other side has closed."""
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
    """Return a message with its length before it and the descriptors that came along."""
    header, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, 1)
    rest = receive(control, LENGTH.size - len(header)) if header else None
    if rest is None:
        return None
    message = receive(control, *LENGTH.unpack(header + rest))
    return None if message is None else (message, list(descriptors))


class ForkServer:
    """The process that forks. It keeps each child's socket, to say on it how the child ended."""

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
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance's last words
            self._selector.close()
            for inherited in (self._control, self._woken, self._wake, *self._children.values()):
                inherited.close()
            limit_memory(self._settings["memory_mib"])
            GrammarProcess(connection, grammar, self._settings).run(self._tables)
        except MemoryError:
            os.abort()  # as llguidance does
        finally:
            os._exit(0)

    def _reap(self) -> None:
        """Say of each child that has ended which signal ended it, 0 for none."""
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
        file.write("1000")  # the kernel ends these processes before the trainer
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
