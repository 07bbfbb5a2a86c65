"""Thread of a store that runs functions in groups: all that wait when it is free are one group."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_jax.types import Span

# A group ends in one turn of the event loop, which is then busy with the answers of all its calls.
MAX_GROUP = 64


@dataclass
class Job:
    """Function to run in a group, or spans to add, and the future of its result."""

    future: asyncio.Future[Any]
    function: Callable[[], Any] | None = None
    rollout_id: str | None = None  # of the spans
    spans: Sequence[Span] = ()
    result: Any = None
    error: BaseException | None = None

    def run(self, function: Callable[[], Any]) -> None:
        """Call the function and keep its result or error."""
        try:
            self.result = function()
        except BaseException as error:  # noqa: BLE001  (raised again in the waiting caller)
            self.error = error

    def resolve(self) -> None:
        """Give the result to the caller, unless it was cancelled. For the event loop's thread."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class GroupThread:
    """Thread that takes jobs in their order, at most MAX_GROUP at once.

    `run_group` sets their results and errors.
    """

    def __init__(self, run_group: Callable[[Sequence[Job]], None]) -> None:
        self._run_group = run_group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._is_busy = False

    def add(self, job: Job) -> None:
        """Add a job. Raise RuntimeError after `close`."""
        with self._lock:
            if not self._is_busy:
                self._thread.submit(self._run)
                self._is_busy = True
            self._waiting.append(job)

    def close(self) -> None:
        """Return once the waiting jobs have run."""
        self._thread.shutdown()

    def _run(self) -> None:
        while group := self._take():
            self._run_group(group)
            loops = {job.future.get_loop() for job in group}
            for loop in loops:
                ended = [job for job in group if job.future.get_loop() is loop]
                with suppress(RuntimeError):  # the loop is closed, so nothing waits on it
                    loop.call_soon_threadsafe(_resolve_all, ended)

    def _take(self) -> list[Job]:
        """Return the next group, or [] if no job waits."""
        with self._lock:
            number = min(len(self._waiting), MAX_GROUP)
            self._is_busy = number > 0
            return [self._waiting.popleft() for _ in range(number)]


def _resolve_all(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.resolve()
