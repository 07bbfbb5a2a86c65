"""Calls that the engine works on. Any number of requests may listen to one.

A client that gives up on a call and sends it again must not sample twice. The rollout would hold a
call whose answer the agent never read. So a retry joins the call that it repeats. A request is a
retry if all of these hold:

* It has `x-stainless-retry-count` above 0 (OpenAI's and Anthropic's clients count their retries),
  or an `Idempotency-Key` that was sent before.
* The same rollout sent the same body to the same path.
* That call is still running or ended less than JOINABLE_S ago.

Two equal requests without these headers are two calls, because sampling twice at temperature 1 is a
legitimate wish. If one of several equal calls failed, the next retry is for that call and samples
again. Otherwise it joins a call that its client gave up on, or else the newest.

A client that disconnects frees its slot within a step, with one exception. If it disconnects when
its declared timeout (`x-stainless-read-timeout`) has passed, it is about to retry. The call then
continues for RETRY_GRACE_S.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import ReplyContext

RETRY_GRACE_S = 10.0  # OpenAI's client waits at most 8 s before it retries
JOINABLE_S = 60.0
TOKEN_BYTES = 1000  # memory for one token while its call is kept...
ALTERNATIVE_BYTES = 110  # ...and for each alternative to it

# Renders and answers a call. Reports the engine's acceptance and each piece to the running call.
Work = Callable[["RunningCall"], Coroutine[Any, Any, tuple[Answer, ...]]]


class RunningCall:
    """One call, from its start until no request may join it. Use it in one event loop only."""

    context: ReplyContext  # once the engine has accepted it

    def __init__(self, work: Work) -> None:
        self.was_accepted = False
        self.given_up = False  # no request has its answer or waits for it
        self.num_bytes = 0  # approximate memory kept for requests that join
        self._deltas: list[Delta] = []
        self._num_listeners = 0
        self._ended: float | None = None
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(work(self))
        self.task.add_done_callback(self._on_done)

    def accept(self, context: ReplyContext) -> None:
        """Tell the listeners that the engine has accepted the call."""
        self.context, self.was_accepted = context, True
        self._changed.set()

    def emit(self, delta: Delta) -> None:
        """Give the listeners the next piece."""
        self._deltas.append(delta)
        if delta.chunk is not None:
            best = sum(map(len, delta.chunk.top_logprobs))
            self.num_bytes += TOKEN_BYTES * len(delta.chunk.token_ids) + ALTERNATIVE_BYTES * best
        self._changed.set()

    async def accepted(self) -> None:
        """Wait until the engine has accepted the call. Raise the call's error if it failed before
        that.
        """
        while not self.was_accepted and not self.task.done():
            await self._wait()
        if not self.was_accepted:
            await self.answers()

    async def deltas(self, patience_s: float | None = None) -> AsyncIterator[Delta | None]:
        """Yield all pieces from the first one on, as they arrive. Raise the call's error if it
        fails.

        Yield None whenever `patience_s` passes without a piece.
        """
        seen = 0
        while True:
            while seen < len(self._deltas):
                seen += 1
                yield self._deltas[seen - 1]
            if self.task.done():
                break
            try:
                async with asyncio.timeout(patience_s):
                    await self._wait()
            except TimeoutError:
                yield None
        await self.answers()

    async def answers(self) -> tuple[Answer, ...]:
        """Return one answer per choice when the call ends. Raise the call's error if it fails."""
        return await asyncio.shield(self.task)

    def joinable(self) -> bool:
        """Return whether a retry may join this call. A failed call is not joinable, so a retry
        samples again.
        """
        if self._ended is None:
            return True
        failed = self.task.cancelled() or self.task.exception() is not None
        return not failed and time.monotonic() - self._ended < JOINABLE_S

    @contextmanager
    def listen(self, keep: Callable[[], bool]) -> Iterator[None]:
        """Register one request as a listener while the body runs.

        If the last listener leaves early, the call ends. If `keep` says that a retry may come, it
        continues for RETRY_GRACE_S.
        """
        self._num_listeners, self.given_up = self._num_listeners + 1, False
        try:
            yield
        finally:
            self._num_listeners -= 1
            if not self._num_listeners and not self.task.done():
                self.given_up = True
                if keep():
                    asyncio.get_running_loop().call_later(RETRY_GRACE_S, self._cancel_if_alone)
                else:
                    self.task.cancel()

    def _on_done(self, task: asyncio.Task) -> None:
        self._ended = time.monotonic()
        self._changed.set()
        # Mark the error as retrieved: without listeners, only the call's span reports it.
        _ = task.cancelled() or task.exception()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _cancel_if_alone(self) -> None:
        if not self._num_listeners:
            self.task.cancel()


class RunningCalls:
    """Calls of one rollout, by the identity of their requests.

    Ended ones take at most `max_bytes`. The oldest are forgotten first, and a retry of one of them
    samples again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_forgotten = 0  # dropped for lack of room while a retry might still have come
        self._calls: list[tuple[str, RunningCall]] = []  # oldest first
        self._failed: Counter[str] = Counter()  # failed calls that were not retried yet

    def find(self, identity: str) -> RunningCall | None:
        """Return the call that a retry may join, or None if it has to sample again."""
        if self._failed[identity]:
            self._failed[identity] -= 1
            return None
        calls = [call for same, call in self._calls if same == identity and call.joinable()]
        return next((call for call in calls if call.given_up), calls[-1] if calls else None)

    def add(self, identity: str, call: RunningCall) -> None:
        """Add the newest call of an identity. Forget old ones once no request may join them."""
        self._calls.append((identity, call))
        call.task.add_done_callback(lambda task: self._note(identity, task))
        self._forget()

    def _forget(self) -> None:
        calls = [(identity, call) for identity, call in self._calls if call.joinable()]
        kept = sum(call.num_bytes for _, call in calls if call.task.done())
        self._calls = []
        for identity, call in calls:
            if call.task.done() and kept > self._max_bytes:
                kept -= call.num_bytes
                self.num_forgotten += 1
            else:
                self._calls.append((identity, call))

    def _note(self, identity: str, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failed[identity] += 1
        self._forget()

    def cancel(self) -> None:
        """Cancel the calls that are still running."""
        for _, call in self._calls:
            call.task.cancel()


def identity_of(path: str, body: bytes, headers: Mapping[str, str]) -> str:
    """Return a digest that all tries of one request share."""
    key = headers.get("Idempotency-Key", "").encode("utf-8", "surrogateescape")
    return hashlib.blake2b(b"\n".join((path.encode(), key, body)), digest_size=16).hexdigest()


def is_repetition(headers: Mapping[str, str]) -> bool:
    """Return whether the headers say that the request may have been sent before."""
    tries = headers.get("x-stainless-retry-count", "0")
    # Compared as text, because Python refuses to parse an integer of thousands of digits.
    return "Idempotency-Key" in headers or (tries.isdecimal() and tries.strip("0") != "")


def declared_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return the client's declared timeout in seconds, or None if there is none."""
    try:
        return float(headers["x-stainless-read-timeout"])
    except (KeyError, ValueError):
        return None
