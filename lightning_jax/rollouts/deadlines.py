"""Time limits of rollouts, which do not count stalls, pauses and waits in the engine's queue."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_jax.gateway.sessions.waits import Lost
from lightning_jax.system.clock import PausableClock

TICK_S = 0.5  # in which a stall is noticed, and that a rollout is over


class DeadlineClock:
    """Clock of all rollouts of one event loop.

    The loop stalls if something holds the interpreter or the process is stopped. The gateway then
    answers no call, so the time must not count against an agent. One timer measures stalls for all
    rollouts, because a thousand of them would keep the loop busy with timers of their own.
    """

    def __init__(self, pauses: PausableClock) -> None:
        self._pauses = pauses
        # An entry per waiting rollout: the future that ends its wait early, and a function that
        # returns True if it is over.
        self._watched: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._stalled_s = 0.0
        self._due: float | None = None  # when the next tick should come; None: nobody waits

    async def wait(
        self,
        agent: asyncio.Task[Any],
        timeout_s: float,
        over: Callable[[], bool],
        lost: Callable[[], Awaitable[Lost]],
    ) -> tuple[bool, float]:
        """Return (True if the agent ended within its time, seconds in which the loop stalled).

        `lost` returns the seconds that the agent has lost to waiting, which do not count. Stop
        waiting once the agent is starved, or `over` says that its server is gone or answers no
        more calls.
        """
        loop = asyncio.get_running_loop()
        with self._watching(over) as gone:
            began, stalled, paused = loop.time(), self._stalled(), self._pauses.total_s
            waits = Lost()

            def left_s() -> float:
                not_counted = self._stalled() - stalled + self._pauses.total_s - paused
                not_counted += waits.total_s + waits.silent_s
                return timeout_s - (loop.time() - began - not_counted)

            while not agent.done() and not gone.done():
                least = TICK_S if self._pauses.is_active else 0.0
                if left_s() <= 0:  # only now, because the server may be another process
                    waits = await lost()
                    if waits.starve(timeout_s) or left_s() <= 0:
                        break
                    least = TICK_S
                either, first = {agent, gone}, asyncio.FIRST_COMPLETED
                limit = max(min(left_s(), timeout_s - waits.latest_s), least)
                await asyncio.wait(either, timeout=limit, return_when=first)
            return agent.done(), self._stalled() - stalled

    @contextmanager
    def _watching(self, over: Callable[[], bool]) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done once `over` returns True."""
        gone = asyncio.get_running_loop().create_future()
        self._watched[gone] = over
        if over():
            gone.set_result(None)
        if self._due is None:
            self._schedule()
        try:
            yield gone
        finally:
            del self._watched[gone]
            gone.cancel()

    def _stalled(self) -> float:
        """Return the seconds of stalls so far, one that is just ending included."""
        now = asyncio.get_running_loop().time()
        late = 0.0 if self._due is None else max(now - self._due, 0.0)
        return self._stalled_s + late

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK_S
        loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self._stalled_s, self._due = self._stalled(), None
        for gone, over in self._watched.items():
            if not gone.done() and over():
                gone.set_result(None)
        if self._watched:
            self._schedule()
