"""Thread that passes work to a place outside the run, which may be slow, full or gone."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

P = TypeVar("P")
Action = Callable[[P], object]


class Feed(Generic[P]):
    """Thread that opens a place, gives it work in order and closes it.

    Work has a size, and at most `max_waiting` of it waits. What the place does not take is counted
    in `num_lost`, and `warn` gets the first reason.
    """

    def __init__(
        self,
        name: str,
        open_place: Callable[[], tuple[P, Sequence[Action[P]]]],
        warn: Callable[[str], object],
        max_waiting: int,
    ) -> None:
        """`open_place` returns the place and what to do first, each of the size 1."""
        self.name, self.num_lost = name, 0
        self._warn, self._max_waiting = warn, max_waiting
        self._lock, self._has_warned = threading.Lock(), False
        self._num_waiting = 0  # with the work that is being done
        self._is_over = False  # nobody waits, and all that is left is counted as lost
        self._actions: queue.SimpleQueue[tuple[int, Action[P]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(open_place,), name=f"feed-{name}", daemon=True
        )
        self._thread.start()

    def put(self, action: Action[P], size: int = 1) -> None:
        """Pass on work, or lose it if too much waits. Never waits."""
        with self._lock:
            fits = not self._num_waiting or self._num_waiting + size <= self._max_waiting
            self._num_waiting += size * fits
        if fits:
            self._actions.put((size, action))
        else:
            self.lose(size, f"{self._max_waiting:,} wait already")

    def close(self, *last: Action[P], deadline: float, limit: str) -> None:
        """Do the last work, and wait for it until a time of the monotonic clock.

        `limit` is the setting that the deadline comes from.
        """
        for action in last:
            self._actions.put((0, action))
        self._actions.put(None)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self.lose(self._num_waiting, f"it was not done in {limit}")
            self._is_over = True

    def lose(self, number: int, reason: str) -> None:
        """Count work that the place did not take."""
        with self._lock:
            if self._is_over:
                return
            self.num_lost += number
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            self._warn(reason)

    def _run(self, open_place: Callable[[], tuple[P, Sequence[Action[P]]]]) -> None:
        opened = self._attempt(0, open_place)
        for action in opened[1] if opened else ():
            self._attempt(1, action, opened[0])
        while (work := self._actions.get()) is not None and not self._is_over:
            size, action = work
            if opened is None:
                self.lose(size, "it was not opened")
            else:
                self._attempt(size, action, opened[0])
            with self._lock:
                self._num_waiting -= size

    def _attempt(self, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (foreign code)
            self.lose(size, f"{type(error).__name__}: {error}")
