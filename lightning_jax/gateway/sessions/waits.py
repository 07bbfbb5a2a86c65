"""Responses of one rollout that wait or decode, and the time that it lost to waiting."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from lightning_jax.engine.response import TimeLimit

MAX_WAITS = 10  # times the limit of a rollout that it may lose to waiting in all
PATIENCE_S = 1.0  # a store that takes longer is locked or overloaded
_CURRENT: ContextVar["Waits | None"] = ContextVar("waits", default=None)


class Lost(NamedTuple):
    """Seconds that a rollout has lost to waiting."""

    total_s: float = 0.0
    latest_s: float = 0.0  # since a response of it last got its first token
    silent_s: float = 0.0  # in which nobody heard of its worker

    def starve(self, timeout_s: float) -> bool:
        """Return True if the server is to blame that a rollout with this limit does not end.

        No call of it got a token for `timeout_s`, or MAX_WAITS times that were lost in all.
        """
        return self.latest_s > timeout_s or self.total_s > MAX_WAITS * timeout_s


class Waits:
    """Responses in flight by their time limits. Use it on one event loop.

    A response waits until its first token: for a slot, a compilation or its prompt's prefill. Time
    in which all responses in flight wait is lost to the rollout by no fault of its agent. Once one
    of them decodes, the time is the agent's again, so that an agent cannot stop its clock with more
    calls than the server has slots. Other work of the server for the rollout is counted alike: it
    waits for a thread, and then the time is the agent's. `now_s` is a clock that stands still in
    pauses.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._waiting: set[object] = set()  # time limits of responses, and other work
        self._working: set[object] = set()
        self._decoding: dict[TimeLimit, asyncio.Task] = {}
        self._past = Lost()
        self._since_s: float | None = None  # begin of the present loss

    @property
    def lost(self) -> Lost:
        """Seconds lost so far."""
        more_s = 0.0 if self._since_s is None else self._now_s() - self._since_s
        return Lost(self._past.total_s + more_s, self._past.latest_s + more_s)

    def add(self, responses: Sequence[TimeLimit]) -> None:
        """Add responses that wait."""
        self._waiting.update(responses)
        self._measure()

    def begin(self, response: TimeLimit, task: asyncio.Task) -> None:
        """Note that a response has its first token. `task` ends once its call is recorded."""
        self._waiting.discard(response)
        self._decoding[response] = task
        self._measure()
        self._past = self._past._replace(latest_s=0.0)

    def remove(self, responses: Sequence[TimeLimit]) -> None:
        """Remove responses that have ended. Unknown ones are allowed."""
        for response in responses:
            self._waiting.discard(response)
            self._decoding.pop(response, None)
        self._measure()

    def add_work(self, work: object) -> None:
        """Add other work that waits."""
        self._waiting.add(work)
        self._measure()

    def begin_work(self, work: object) -> None:
        """Note that work no longer waits, unless it was removed."""
        if work in self._waiting:
            self._waiting.discard(work)
            self._working.add(work)
            self._measure()

    def remove_work(self, work: object) -> None:
        """Remove work that has ended. Unknown work is allowed."""
        self._waiting.discard(work)
        self._working.discard(work)
        self._measure()

    def end_decoding(self) -> set[asyncio.Task]:
        """Let the responses that decode end with their next token. Return their calls' tasks."""
        for response in self._decoding:
            response.end()
        return set(self._decoding.values())

    def _measure(self) -> None:
        is_lost = bool(self._waiting) and not self._decoding and not self._working
        if is_lost and self._since_s is None:
            self._since_s = self._now_s()
        elif not is_lost and self._since_s is not None:
            self._past, self._since_s = self.lost, None


@contextmanager
def counted_for(waits: Waits | None) -> Iterator[None]:
    """Count waits of requests that begin in this context for a rollout."""
    token = _CURRENT.set(waits)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_waits() -> Waits | None:
    """Return the waits of the rollout whose request is being handled, or None."""
    return _CURRENT.get()


@contextmanager
def waiting_for_store() -> Iterator[None]:
    """Count the time in this context as lost, from PATIENCE_S on."""
    waits = _CURRENT.get()
    if waits is None:
        yield
        return
    work = object()
    adding = asyncio.get_running_loop().call_later(PATIENCE_S, waits.add_work, work)
    try:
        yield
    finally:
        adding.cancel()
        waits.remove_work(work)
