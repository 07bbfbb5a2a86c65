"""Engines with the same weights, each on devices of its own, as one loop.

A mesh's `data` axis counts them. They share nothing: each has slots, a prefix cache and a thread,
so none waits for another's prompts. What they lack is each other's cache, so a request goes where
the beginning of its prompt was read before.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from lightning_jax.serve.generation import Generation
from lightning_jax.serve.intake import LoopStatus, together
from lightning_jax.serve.loop import EngineLoop
from lightning_jax.types import SamplingParams

log = logging.getLogger(__name__)

BLOCK = 64  # tokens; beginnings are known in multiples of it
FAILED = 2**31  # the load of an engine that answers no more
MOST_BLOCKS = 2**16  # remembered, those used last; 4 million tokens


def split_by_data(mesh: Mesh) -> list[Mesh]:
    """The meshes of a serving mesh's copies of the weights. Of several processes the mesh itself,
    whose devices then do the same: all processes take part each time that weights are published.
    """
    if jax.process_count() > 1:
        return [mesh]
    return [
        Mesh(mesh.devices[i : i + 1], mesh.axis_names, axis_types=mesh.axis_types)
        for i in range(mesh.shape["data"])
    ]


def replicate(make: Callable[[Any], Any], engines: Sequence[Any], slots: int) -> Any:
    """One loop over all engines, each of which `make` gives one of its own."""
    loops = [make(engine) for engine in engines]
    if len(loops) == 1:
        return loops[0]
    log.info("%d engines with %d slots each serve the same weights", len(loops), slots)
    return ReplicatedLoop(loops, slots)


class Router:
    """Which of several caches to ask, by what each was asked before. Any thread."""

    def __init__(self, number: int, slots: int) -> None:
        self._slack = max(1, slots // 4)
        self._readers: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    def choose(self, prompt: Sequence[int], loads: Sequence[int]) -> int:
        """A place in `loads`, the numbers of open requests: that which read more than half of the
        prompt last, unless it has a quarter of its slots more to do than the one with least.
        """
        beginnings = _beginnings(prompt)
        least = min(range(len(loads)), key=loads.__getitem__)
        with self._lock:
            known = (i for i in reversed(range(len(beginnings))) if beginnings[i] in self._readers)
            longest = next(known, -1)
            chosen = least
            if 2 * (longest + 1) * BLOCK > len(prompt):
                reader = self._readers[beginnings[longest]]
                if loads[reader] <= loads[least] + self._slack:
                    chosen = reader
            for beginning in beginnings:
                self._readers[beginning] = chosen
                self._readers.move_to_end(beginning)
            while len(self._readers) > MOST_BLOCKS:
                self._readers.popitem(last=False)
        return chosen

    def forget(self) -> None:
        """The caches were emptied."""
        with self._lock:
            self._readers.clear()


def _beginnings(prompt: Sequence[int]) -> list[int]:
    """Hashes of the prompt's first block, its first two, ..."""
    found, last = [], 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        last = hash((last, *prompt[start : start + BLOCK]))
        found.append(last)
    return found


class ReplicatedLoop:
    """Loops of the same weights, with the methods of one `EngineLoop`."""

    def __init__(self, loops: Sequence[EngineLoop], slots: int) -> None:
        self._loops, self._router = tuple(loops), Router(len(loops), slots)

    @property
    def version(self) -> int:
        """The version that the next request is answered with."""
        return self._loops[-1].version

    @property
    def status(self) -> LoopStatus:
        """As `EngineLoop.status`; not ok as soon as one loop is not."""
        return together(loop.status for loop in self._loops)

    @property
    def num_slots(self) -> int:
        """Return how many requests all loops decode at once."""
        return sum(loop.num_slots for loop in self._loops)

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return sum(loop.num_open for loop in self._loops)

    def warmup(self) -> None:
        """Compiles all programs, those of different devices side by side. Before `start`."""
        with ThreadPoolExecutor(len(self._loops)) as pool:
            list(pool.map(lambda loop: loop.warmup(), self._loops))

    def start(self) -> None:
        """Starts the threads."""
        for loop in self._loops:
            loop.start()

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """As `EngineLoop.prepare`; all loops share the answer."""
        await self._loops[0].prepare(grammar, owner)

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: int | None = None,
        tenant: str | None = None,
    ) -> Generation:
        """As `EngineLoop.submit`."""
        # One that has failed has nothing to do, and would get all.
        loads = [loop.num_open if loop.status != "failed" else FAILED for loop in self._loops]
        chosen = self._loops[self._router.choose(prompt_ids, loads)]
        return chosen.submit(prompt_ids, sampling, adapter, tenant)

    def load_weights(self, params: Any | None, version: int) -> None:
        """As `EngineLoop.load_weights`, of one loop after the other. Weights are gathered once."""
        if params is not None:
            params = self._loops[0].spread(params)
        for loop in self._loops:
            loop.load_weights(params, version)
        if params is not None:
            self._router.forget()

    async def drain(self) -> None:
        """Takes no more requests, and returns when none is left."""
        await asyncio.gather(*(loop.drain() for loop in self._loops))

    def close(self) -> None:
        """Stops the threads; requests that are not finished fail with EngineError."""
        for loop in self._loops:
            loop.close()

    def stats(self) -> dict[str, float]:
        """The counters of all loops together."""
        found = [loop.stats() for loop in self._loops]
        return {name: sum(stats[name] for stats in found) for name in found[0]}
