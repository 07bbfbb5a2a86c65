"""Clock that stands still while it is paused, with deadlines on it, and waits between tries."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class PausableClock:
    """Clock of the seconds outside of pauses, such as updates on the devices that also serve.

    Use it on one event loop. Any thread may read `now_s`.
    """

    def __init__(self) -> None:
        self._num_open = 0
        # (length of past pauses, begin of the present one), replaced as a whole.
        self._past: tuple[float, float | None] = 0.0, None
        self._left_s: dict[asyncio.Timeout, float] = {}  # of each deadline, during a pause

    @property
    def is_active(self) -> bool:
        return self._num_open > 0

    @property
    def total_s(self) -> float:
        """Return the length of all pauses so far, in seconds."""
        ended_s, since = self._past
        return ended_s + (0.0 if since is None else time.monotonic() - since)

    def now_s(self) -> float:
        """Return the time of a clock that stands still in pauses."""
        return time.monotonic() - self.total_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the clock and all deadlines on it stand still."""
        self._num_open += 1
        if self._num_open == 1:
            now = asyncio.get_running_loop().time()
            self._past = self._past[0], time.monotonic()
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
                self._past = self.total_s, None
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


def backoff_s(num_failures: int, first_s: float, max_s: float) -> float:
    """Return the wait after so many failures in a row: `first_s`, doubled each time, up to `max_s`.

    It is 0 after none.
    """
    return min(first_s * 2.0 ** min(num_failures - 1, 60), max_s) if num_failures else 0.0
