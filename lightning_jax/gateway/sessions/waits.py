"""Responses of one rollout that wait or decode, and the time that it lost to waiting."""

import asyncio
from collections.abc import Callable, Iterator
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
    """Responses in flight and other work for a rollout. Use it on one event loop.

    A response waits until its first token: for a slot, a compilation or its prompt's prefill. Time
    in which all responses in flight wait is lost to the rollout by no fault of its agent. Once one
    of them decodes, the time is the agent's again, so that an agent cannot stop its clock with more
    calls than the server has slots. Other work of the server for the rollout is counted alike: it
    waits for a thread, and then the time is the agent's. `now_s` is a clock that stands still in
    pauses.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._waiting: set[object] = set()
        self._active: dict[object, asyncio.Task | None] = {}  # with the task of a response
        self._past = Lost()
        self._since_s: float | None = None  # begin of the present loss

    @property
    def lost(self) -> Lost:
        """Seconds lost so far."""
        more_s = 0.0 if self._since_s is None else self._now_s() - self._since_s
        return Lost(self._past.total_s + more_s, self._past.latest_s + more_s)

    def add(self, *items: object) -> None:
        """Add items that wait: the time limits of responses, or other work."""
        self._waiting.update(items)
        self._measure()

    def begin(self, item: object, task: asyncio.Task | None = None) -> None:
        """Note that an item no longer waits, unless it was removed.

        A response begins with its first token. `task` is the task of its call, which ends once the
        call is recorded.
        """
        if item not in self._waiting:
            return
        self._waiting.discard(item)
        self._active[item] = task
        self._measure()
        if task:
            self._past = self._past._replace(latest_s=0.0)

    def remove(self, *items: object) -> None:
        """Remove items that have ended. Unknown items are allowed."""
        for item in items:
            self._waiting.discard(item)
            self._active.pop(item, None)
        self._measure()

    def end_decoding(self) -> set[asyncio.Task]:
        """Let the responses that decode end with their next token. Return their calls' tasks."""
        for item in self._active:
            if isinstance(item, TimeLimit):
                item.end()
        return {task for task in self._active.values() if task}

    def _measure(self) -> None:
        is_lost = bool(self._waiting) and not self._active
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
    adding = asyncio.get_running_loop().call_later(PATIENCE_S, waits.add, work)
    try:
        yield
    finally:
        adding.cancel()
        waits.remove(work)
