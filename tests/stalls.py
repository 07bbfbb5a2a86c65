"""Measurement of how long an event loop is blocked."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lightning_jax.rollouts.agents.event_loop import current_line

BEAT_S = 0.01  # between two readings of the clock
SAMPLED_AFTER_S = 0.03  # a stall of this length gets its line recorded


@dataclass(frozen=True)
class Stall:
    """One interval in which the loop was blocked.

    `seconds` excludes the beat itself. It also excludes time in which the loop's thread, or a
    Python thread that it may have waited for, was ready to run but had no CPU.
    """

    seconds: float
    wall_s: float = 0.0
    cpu_s: float = 0.0  # for the loop's own thread
    line: str = ""  # line where the loop was blocked, if known


@dataclass
class LoopStalls:
    """Stalls of one loop. `longest` is updated while the loop is watched."""

    longest: Stall = Stall(0.0)
    num_beats: int = 0
    _delays: dict[int, float] = field(default_factory=dict)  # wait for a CPU by thread, in seconds

    def reset(self) -> None:
        """Forget all measurements, for example before the next case."""
        self.longest = Stall(0.0)

    def _note(self, wall_s: float, cpu_s: float, line: str) -> None:
        self.num_beats += 1
        before, self._delays = self._delays, _run_delays()
        delays = {tid: delay - before.get(tid, delay) for tid, delay in self._delays.items()}
        loop_delay = delays.pop(threading.get_native_id(), 0.0)
        seconds = max(wall_s - loop_delay - max(delays.values(), default=0.0), cpu_s, 0.0)
        if seconds > self.longest.seconds:
            self.longest = Stall(seconds, wall_s, cpu_s, line)


@asynccontextmanager
async def loop_stalls() -> AsyncIterator[LoopStalls]:
    """Measure stalls of the running loop until the block ends.

    On Linux the time without a CPU is subtracted, so a busy machine is not a stall. On other
    systems a stall is measured by wall clock.
    """
    stalls = LoopStalls(_delays=_run_delays())
    beat_at = [time.monotonic()]
    lines = [""]
    stop = threading.Event()

    async def beat() -> None:
        cpu = time.thread_time()
        while True:
            await asyncio.sleep(BEAT_S)
            now, cpu_now = time.monotonic(), time.thread_time()
            stalls._note(now - beat_at[0] - BEAT_S, cpu_now - cpu, lines[0])
            lines[0], beat_at[0], cpu = "", time.monotonic(), time.thread_time()

    def sample(thread: threading.Thread) -> None:
        while not stop.wait(BEAT_S):
            if not lines[0] and time.monotonic() - beat_at[0] > BEAT_S + SAMPLED_AFTER_S:
                lines[0] = current_line(thread)

    sampler = threading.Thread(target=sample, args=(threading.current_thread(),), daemon=True)
    task = asyncio.create_task(beat())
    sampler.start()
    try:
        yield stalls
        await asyncio.sleep(2 * BEAT_S)  # the next beat sees a stall just before the end
    finally:
        stop.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(sampler.join)


def _run_delays() -> dict[int, float]:
    """Return the seconds each Python thread was ready to run without a CPU, or {} if unknown."""
    delays = {}
    for thread in threading.enumerate():
        with contextlib.suppress(OSError, IndexError, ValueError):
            path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            delays[int(thread.native_id or 0)] = int(path.read_text().split()[1]) / 1e9
    return delays
