"""Slots, queue and tokens per second of a running training, from the counters of its server."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning_jax.gateway.sessions.open_rollouts import Activity

WINDOW_S = 10.0  # over which the rate is measured
MIN_GAP_S = 1.0  # between two readings that are kept
TOKENS = "serve/tokens_generated"


class Throughput:
    """Rate of sampled tokens, measured between the requests of the page. Use it in one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readings: deque[tuple[float, float]] = deque()  # (time in seconds, total of tokens)

    def observe(self, activity: Activity) -> dict[str, Any]:
        """Return what the server does now. A number that it does not count is None.

        The rate is None until there are two readings with at least MIN_GAP_S between them.
        """
        stats, now = activity.stats, self._clock()
        total = stats.get(TOKENS)
        while self._readings and now - self._readings[0][0] > WINDOW_S:
            self._readings.popleft()
        rate = seconds = None
        if total is not None:
            if self._readings and now - self._readings[0][0] >= MIN_GAP_S:
                seconds = now - self._readings[0][0]
                rate = max(total - self._readings[0][1], 0.0) / seconds
            if not self._readings or now - self._readings[-1][0] >= MIN_GAP_S:
                self._readings.append((now, total))
        return {
            "slots": activity.num_slots or None,
            "slots_used": stats.get("serve/running"),
            "queue": stats.get("serve/queue_depth"),
            "compiling": stats.get("serve/compiling"),
            "open_requests": stats.get("serve/open"),
            "tokens_per_s": rate,
            "window_s": seconds,
        }
