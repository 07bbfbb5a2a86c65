"""Calls while the engine works on them: any number of requests may listen to one.

A client that gives up on a call and sends it again must not sample twice: the rollout would hold a
call whose answer the agent never read. So a repeated request joins the call that it repeats. It is
a repetition if it says so, by `x-stainless-retry-count` above 0 (as OpenAI's and Anthropic's
clients count their tries) or by an `Idempotency-Key` that was there before, and if the same rollout
sent the same body to the same path, and that call runs still or ended less than JOINABLE_S ago. Two
equal requests that do not say so are two calls: asking twice at temperature 1 is a thing to want.
Where one of several equal calls failed, the next repetition is of that one, and samples anew; where
one was given up by its client, the next is of that one, and else of the newest.

A client that hangs up frees its slot within a step, but for one case: if it hung up when the
time-out that it declared (`x-stainless-read-timeout`) was over, it is about to ask again, and the
call goes on for RETRY_GRACE_S.
"""

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import ReplyContext

RETRY_GRACE_S = 10.0  # OpenAI's client waits at most 8 s before it tries again
JOINABLE_S = 60.0
TOKEN_BYTES = 1000  # that a token takes as long as its call is kept...
ALTERNATIVE_BYTES = 110  # ...and each alternative to it

Emit = Callable[[Delta], None]
# Does the call: `accepted` once the engine has it, `emit` for every piece, then the answers.
Work = Callable[[Callable[[], None], Emit], Coroutine[Any, Any, tuple[Answer, ...]]]


@dataclass(eq=False)
class RunningCall:
    """One call, from its start until nobody may ask for it any more. Belongs to one event loop."""

    work: Work
    context: ReplyContext
    _deltas: list[Delta] = field(default_factory=list)
    _accepted: bool = False
    _listeners: int = 0
    _given_up: bool = False  # its last listener left before it ended
    num_bytes: int = 0  # about so many are kept for whoever joins
    _ended: float | None = None

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self.work(self._accept, self._emit))
        self._task.add_done_callback(self._on_done)

    async def accepted(self) -> None:
        """Returns once the engine has taken the call. Raises what the call raised before."""
        while not self._accepted and not self._task.done():
            await self._wait()
        if not self._accepted:
            await self.answers()

    async def deltas(self) -> AsyncIterator[Delta]:
        """All pieces from the first on, as they come. Raises what the call raised."""
        seen = 0
        while True:
            while seen < len(self._deltas):
                seen += 1
                yield self._deltas[seen - 1]
            if self._task.done():
                break
            await self._wait()
        await self.answers()

    async def answers(self) -> tuple[Answer, ...]:
        """One answer per choice, at the end. Raises what the call raised."""
        return await asyncio.shield(self._task)

    def joinable(self) -> bool:
        """Whether a repeated request may still share it. A failed call is worth another try."""
        if self._ended is None:
            return True
        failed = self._task.cancelled() or self._task.exception() is not None
        return not failed and time.monotonic() - self._ended < JOINABLE_S

    @contextmanager
    def listen(self, keep: Callable[[], bool]) -> Iterator[None]:
        """Around all that one request asks of the call. `keep`: asked when it leaves too early."""
        self._listeners, self._given_up = self._listeners + 1, False
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners and not self._task.done():
                self._given_up = True
                self._abandon(keep())

    def cancel(self) -> None:
        self._task.cancel()

    @property
    def was_accepted(self) -> bool:
        """Return whether the engine took the call."""
        return self._accepted

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    @property
    def given_up(self) -> bool:
        """Whether nobody has its answer, nor waits for it."""
        return self._given_up

    @property
    def task(self) -> asyncio.Task:
        return self._task

    def _on_done(self, task: asyncio.Task) -> None:
        self._ended = time.monotonic()
        self._changed.set()
        # A call that nobody listens to any more may fail unheard: its span says so.
        _ = task.cancelled() or task.exception()

    def _accept(self) -> None:
        self._accepted = True
        self._changed.set()

    def _emit(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if delta.chunk is not None:
            best = sum(map(len, delta.chunk.top_logprobs))
            self.num_bytes += TOKEN_BYTES * len(delta.chunk.token_ids) + ALTERNATIVE_BYTES * best
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _abandon(self, keep: bool) -> None:
        """Nobody listens: the call ends now, or later where it may be asked for again."""
        if keep:
            asyncio.get_running_loop().call_later(RETRY_GRACE_S, self._cancel_if_alone)
        else:
            self.cancel()

    def _cancel_if_alone(self) -> None:
        if not self._listeners and self._ended is None:
            self.cancel()


class RunningCalls:
    """The calls of one rollout by what makes a request the same request.

    Ended ones take at most `max_bytes`; the oldest are forgotten first, and a repetition of one of
    them samples anew.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_forgotten = 0  # for lack of room, while a retry might still have asked for them
        self._calls: deque[tuple[str, RunningCall]] = deque()  # oldest first
        self._failed: Counter[str] = Counter()  # calls that were not repeated yet

    def find(self, identity: str) -> RunningCall | None:
        """The call that a repetition may join."""
        if self._failed[identity]:
            self._failed[identity] -= 1
            return None
        known = [call for same, call in self._calls if same == identity and call.joinable()]
        return next((call for call in known if call.given_up), known[-1] if known else None)

    def add(self, identity: str, call: RunningCall) -> None:
        """The newest call of that identity; the oldest are forgotten once nobody may join them."""
        self._calls.append((identity, call))
        call.task.add_done_callback(lambda task: self._note(identity, task))
        self._forget()

    def _forget(self) -> None:
        while self._calls and not self._calls[0][1].joinable():
            self._calls.popleft()
        kept = sum(call.num_bytes for _, call in self._calls if call.has_ended)
        if kept <= self._max_bytes:
            return
        remaining: deque[tuple[str, RunningCall]] = deque()
        for identity, call in self._calls:
            if call.has_ended and kept > self._max_bytes:
                kept -= call.num_bytes
                self.num_forgotten += 1
            else:
                remaining.append((identity, call))
        self._calls = remaining

    def _note(self, identity: str, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failed[identity] += 1
        self._forget()

    def cancel(self) -> None:
        """Ends those that run."""
        for _, call in self._calls:
            call.cancel()


def identity_of(path: str, body: bytes, headers: Mapping[str, str]) -> str:
    """What two tries of one request have in common."""
    key = headers.get("Idempotency-Key", "").encode("utf-8", "surrogateescape")
    return hashlib.blake2b(b"\n".join((path.encode(), key, body)), digest_size=16).hexdigest()


def is_repetition(headers: Mapping[str, str]) -> bool:
    """Whether the request says that it may have been sent before."""
    tries = headers.get("x-stainless-retry-count", "0")
    # As text: Python refuses to read an integer of thousands of digits.
    return "Idempotency-Key" in headers or (tries.isdecimal() and tries.strip("0") != "")


def declared_timeout_s(headers: Mapping[str, str]) -> float | None:
    """After how many seconds the client gives up, where it says so."""
    try:
        return float(headers["x-stainless-read-timeout"])
    except (KeyError, ValueError):
        return None
