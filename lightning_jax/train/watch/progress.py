"""Progress of a run within a step: a live line in a terminal, else a line in the log at times."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from tqdm import tqdm

from lightning_jax.train.hook import Hook

log = logging.getLogger(__name__)

REDRAW_EVERY_S = 1.0
LOG_EVERY_S = 15.0


class Work(NamedTuple):
    """Work of an engine: tokens sampled and prompt tokens read so far, and what it compiles now."""

    sampled: float = 0.0
    read: float = 0.0
    compiling: float = 0.0  # programs


def count_work(stats: Mapping[str, float]) -> Work:
    """Return the work that a gateway's counters show."""
    names = ("serve/tokens_generated", "serve/prefill_tokens", "serve/compiling")
    return Work(*(stats.get(name, 0.0) for name in names))


class Progress(Hook):
    """Phases of a run, such as a step's rollouts and an evaluation beside them, and how far.

    `count` returns what the engine has done so far.
    """

    def __init__(self, count: Callable[[], Work]) -> None:
        self._count = count
        self._phases: dict[str, tuple[int, int]] = {}  # finished rollouts, and all of them
        self.begin_phase("start")

    def begin_phase(self, phase: str, num_rollouts: int = 0) -> None:
        """Begin a phase, which has this many rollouts, beside phases whose rollouts still run."""
        if all(done >= total for done, total in self._phases.values()):
            self._phases.clear()
            self._started, self._before = time.monotonic(), self._count()
        self._phases[phase] = (0, num_rollouts)

    def rollout_ended(self, phase: str | None) -> None:
        """Count one finished rollout of the phase, or of a later one once all are finished."""
        if phase is None:
            return
        done, total = self._phases[phase]
        self._phases[phase] = (min(done + 1, total), total)

    def line(self) -> str:
        """Return such as `train 0: 12 of 48 rollouts, 310 tokens/s, 900 prompt tokens/s, 14 s`.

        A phase that counts no rollouts, such as a search for prompts, shows tokens once it has any.
        """
        seconds = time.monotonic() - self._started
        parts, word = [], " rollouts"
        for phase, (done, total) in self._phases.items():
            parts.append(f"{phase}: {done} of {total}{word}" if total else phase)
            word = "" if total else word
        now, before, elapsed = self._count(), self._before, max(seconds, 1e-3)
        sampled, read = now.sampled - before.sampled, now.read - before.read
        if not word or sampled or read:
            parts.append(f"{sampled / elapsed:.0f} tokens/s, {read / elapsed:.0f} prompt tokens/s")
            if now.compiling:
                parts.append(f"compiling {now.compiling:.0f}")
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
