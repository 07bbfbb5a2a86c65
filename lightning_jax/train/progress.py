"""Progress of a run within a step: a live line in a terminal, else a line in the log at times."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tqdm import tqdm

log = logging.getLogger(__name__)

REDRAW_EVERY_S = 1.0
LOG_EVERY_S = 15.0


class Progress:
    """Phase of a run, such as a step's rollouts, and how far it is.

    `num_tokens` returns the tokens sampled so far.
    """

    def __init__(self, num_tokens: Callable[[], float]) -> None:
        self._num_tokens = num_tokens
        self.begin("start")

    def begin(self, phase: str, num_rollouts: int = 0) -> None:
        """Begin a phase, which has this many rollouts."""
        self._phase, self._total, self._done = phase, num_rollouts, 0
        self._started, self._tokens = time.monotonic(), self._num_tokens()

    def advance(self) -> None:
        """Count one finished rollout."""
        self._done += 1

    def line(self) -> str:
        """Return such as `eval 0: 12 of 60 rollouts, 310 tokens/s, 14 s`."""
        seconds = time.monotonic() - self._started
        parts = [f"{seconds:.0f} s"]
        if self._total:
            rate = (self._num_tokens() - self._tokens) / max(seconds, 1e-3)
            parts = [f"{self._done} of {self._total} rollouts", f"{rate:.0f} tokens/s", *parts]
        return f"{self._phase}: {', '.join(parts)}"


@asynccontextmanager
async def show_progress(progress: Progress, bar: tqdm) -> AsyncIterator[None]:
    """Show the line beside the bar each second or, if the bar is disabled, log it at times."""

    async def show() -> None:
        while True:
            await asyncio.sleep(LOG_EVERY_S if bar.disable else REDRAW_EVERY_S)
            if bar.disable:
                log.info("%s", progress.line())
            else:
                bar.set_postfix_str(progress.line())

    showing = asyncio.create_task(show())
    try:
        yield
    finally:
        showing.cancel()
