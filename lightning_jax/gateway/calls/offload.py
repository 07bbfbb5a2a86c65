"""Threads for work that would block the event loop."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from lightning_jax.gateway.sessions.waits import current_waits

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 8 * 2**10  # work that takes a few milliseconds runs inline
NUM_THREADS = 2
STEP_VALUES = 256  # in one step of `dump_json`: a token with 20 alternatives, for example
MAX_DEPTH = 16


def dump_json(value: Any, *, ensure_ascii: bool = True, depth: int = MAX_DEPTH) -> str:
    """Return the result of `json.dumps`, made in many short steps so that other threads can run.

    A list or an object with few values in it, or nested deeper than `depth`, is one step.
    """
    is_nested = isinstance(value, dict | list | tuple)
    if not depth or not is_nested or _is_small(value):
        return json.dumps(value, ensure_ascii=ensure_ascii)
    dump = partial(dump_json, ensure_ascii=ensure_ascii, depth=depth - 1)
    if isinstance(value, dict):
        pairs = (
            f"{json.dumps(name, ensure_ascii=ensure_ascii)}: {dump(item)}"
            for name, item in value.items()
        )
        return "{" + ", ".join(pairs) + "}"
    return "[" + ", ".join(map(dump, value)) + "]"


def _is_small(value: Any) -> bool:
    """Return whether a value has at most STEP_VALUES others in it."""
    number, stack = 0, [value]
    while stack:
        item = stack.pop()
        inside = item.values() if isinstance(item, dict) else item
        if isinstance(item, dict | list | tuple):
            number += len(inside)
            if number > STEP_VALUES:
                return False
            stack.extend(inside)
    return True


class FairQueue:
    """Scheduler that lets one request proceed in each iteration of the event loop.

    Otherwise requests that arrive together would all be handled in one iteration and block
    everything else. Rollouts take turns with one request each, so no request waits for all requests
    of a flood.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by rollout

    async def wait(self, rollout: str) -> None:
        """Wait for the caller's turn."""
        rollout_lock = self._locks.setdefault(rollout, asyncio.Lock())
        async with rollout_lock, self._lock:
            await asyncio.sleep(0)


class Offload:
    """Two threads for parsing, rendering and tokenizing long inputs.

    A rollout does not lose the time in which its requests wait for them.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gateway")

    async def run(
        self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the function's result. Call it in a thread if it has many bytes to process."""
        if num_bytes <= INLINE_BYTES:
            return function(*args, **kwargs)
        work, loop = partial(function, *args, **kwargs), asyncio.get_running_loop()
        if (waits := current_waits()) is None:
            return await loop.run_in_executor(self._threads, work)

        def begin() -> T:
            loop.call_soon_threadsafe(waits.begin, work)
            return work()

        waits.add(work)
        try:
            return await loop.run_in_executor(self._threads, begin)
        finally:
            waits.remove(work)

    def close(self) -> None:
        """Accept no more work. Do not wait for running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
