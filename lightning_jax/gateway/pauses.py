"""Deadlines of calls and rollouts, which stand still while something else has the devices."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Pauses:
    """Times in which no deadline runs, such as an update on the devices that also serve.

    Use it on one event loop.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._ended_s, self._since = 0.0, 0.0  # length of past pauses, and begin of the present one
        self._left_s: dict[asyncio.Timeout, float] = {}  # of each deadline, during a pause

    @property
    def is_active(self) -> bool:
        return self._num_open > 0

    @property
    def total_s(self) -> float:
        """Return the length of all pauses so far, in seconds."""
        now = asyncio.get_running_loop().time()
        return self._ended_s + (now - self._since if self.is_active else 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let all deadlines stand still."""
        self._num_open += 1
        if self._num_open == 1:
            now = self._since = asyncio.get_running_loop().time()
            for limit in self._left_s:
                if not limit.expired():
                    self._left_s[limit] = (limit.when() or now) - now
                    limit.reschedule(None)
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                now = asyncio.get_running_loop().time()
                self._ended_s += now - self._since
                for limit, left_s in self._left_s.items():
                    if not limit.expired():
                        limit.reschedule(now + left_s)

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[None]:
        """Like `asyncio.timeout`, without counting pauses."""
        if seconds is None:
            yield
            return
        async with asyncio.timeout(None if self.is_active else seconds) as limit:
            self._left_s[limit] = seconds
            try:
                yield
            finally:
                del self._left_s[limit]
