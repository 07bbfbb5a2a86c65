"""Progress of a run within a step: a live line in a terminal, else a line in the log at times."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from tqdm import tqdm

log = logging.getLogger(__name__)

REDRAW_EVERY_S = 1.0
LOG_EVERY_S = 15.0


def count_tokens(stats: Mapping[str, float]) -> tuple[float, float]:
    """Return the tokens sampled and the prompt tokens read, by a gateway's counters."""
    return stats.get("serve/tokens_generated", 0.0), stats.get("serve/prefill_tokens", 0.0)


class Progress:
    """Phases of a run, such as a step's rollouts and an evaluation beside them, and how far.

    `num_tokens` returns the tokens sampled so far, and those of prompts read so far.
    """

    def __init__(self, num_tokens: Callable[[], tuple[float, float]]) -> None:
        self._num_tokens = num_tokens
        self._phases: dict[str, tuple[int, int]] = {}  # finished rollouts, and all of them
        self.begin("start")

    def begin(self, phase: str, num_rollouts: int = 0) -> None:
        """Begin a phase, which has this many rollouts, beside phases whose rollouts still run."""
        if all(done >= total for done, total in self._phases.values()):
            self._phases.clear()
            self._started, self._tokens = time.monotonic(), self._num_tokens()
        self._phases[phase] = (0, num_rollouts)

    def advance(self, phase: str) -> None:
        """Count one finished rollout of the phase, or of a later one once all are finished."""
        done, total = self._phases[phase]
        self._phases[phase] = (min(done + 1, total), total)

    def line(self) -> str:
        """Return such as `train 0: 12 of 48 rollouts, 310 tokens/s, 900 prompt tokens/s, 14 s`."""
        seconds = time.monotonic() - self._started
        parts, word = [], " rollouts"
        for phase, (done, total) in self._phases.items():
            parts.append(f"{phase}: {done} of {total}{word}" if total else phase)
            word = "" if total else word
        if not word:
            counts = zip(self._num_tokens(), self._tokens, strict=True)
            sampled, read = ((now - before) / max(seconds, 1e-3) for now, before in counts)
            parts.append(f"{sampled:.0f} tokens/s, {read:.0f} prompt tokens/s")
        return ", ".join([*parts, f"{seconds:.0f} s"])


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
