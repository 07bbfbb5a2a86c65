"""Time limits of rollouts, which do not count stalls of the event loop or pauses of the gateway."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_jax.gateway.pauses import Pauses

TICK_S = 0.5  # in which a stall is noticed, and a lost server


class DeadlineClock:
    """Clock of all rollouts of one event loop.

    The loop stalls if something holds the interpreter or the process is stopped. The gateway then
    answers no call, so the time must not count against an agent. One timer measures stalls for all
    rollouts, because a thousand of them would keep the loop busy with timers of their own.
    """

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        # An entry per waiting rollout: the future that ends its wait early, and a function that
        # returns how its server was lost.
        self._watched: dict[asyncio.Future[None], Callable[[], str | None]] = {}
        self._stalled_s = 0.0
        self._due: float | None = None  # when the next tick should come; None: nobody waits

    async def wait(
        self, agent: asyncio.Task[Any], timeout_s: float, loss: Callable[[], str | None]
    ) -> tuple[bool, float]:
        """Return (True if the agent ended within its time, seconds in which the loop stalled).

        Stop waiting once the agent's server is lost.
        """
        loop = asyncio.get_running_loop()
        with self._watching(loss) as lost:
            began, stalled, paused = loop.time(), self._stalled(), self._pauses.total_s
            while not agent.done() and not lost.done():
                not_counted = self._stalled() - stalled + self._pauses.total_s - paused
                left = timeout_s - (loop.time() - began - not_counted)
                if left <= 0:
                    break
                least = TICK_S if self._pauses.is_active else 0.0
                either, first = {agent, lost}, asyncio.FIRST_COMPLETED
                await asyncio.wait(either, timeout=max(left, least), return_when=first)
            return agent.done(), self._stalled() - stalled

    @contextmanager
    def _watching(self, loss: Callable[[], str | None]) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done once `loss` returns a reason."""
        lost = asyncio.get_running_loop().create_future()
        self._watched[lost] = loss
        if loss():
            lost.set_result(None)
        if self._due is None:
            self._schedule()
        try:
            yield lost
        finally:
            del self._watched[lost]
            lost.cancel()

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
        for lost, loss in self._watched.items():
            if not lost.done() and loss():
                lost.set_result(None)
        if self._watched:
            self._schedule()
