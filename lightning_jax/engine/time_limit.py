"""Limit of the time in which one response decodes."""

import time
from collections.abc import Callable


class TimeLimit:
    """Limit that ends a response as "length", with the tokens sampled so far.

    The time runs from the first token: the wait before it is not the response's. It is that of
    `now_s`, a clock that may stand still. Without `seconds`, only `end` ends the response.

    A response checks its limit at each token. Any thread may call `end`.
    """

    def __init__(
        self, seconds: float | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._now_s = seconds, now_s
        self._began_s: float | None = None
        self._has_ended = False

    def end(self) -> None:
        """Let the next token be the last one."""
        self._has_ended = True

    def is_over(self, stalled_s: float = 0.0) -> bool:
        """Return True if the token that was just sampled is the last one.

        `stalled_s` counts the seconds in which the engine stood still, which do not count.
        """
        now_s = self._now_s() - stalled_s
        if self._began_s is None:
            self._began_s = now_s
        is_late = self._seconds is not None and now_s - self._began_s >= self._seconds
        return is_late or self._has_ended
