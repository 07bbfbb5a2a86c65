"""Engine replicas: the same weights on separate devices, behind the interface of one loop.

A mesh's `data` axis gives their number. They share nothing: each has its own slots, prefix cache
and thread, so none waits for another's prompts. Their caches are separate, too, so a request goes
to the replica that has read the start of its prompt before.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from lightning_jax.engine.generation import Generation
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.loop_group import LoopGroup
from lightning_jax.engine.types import SamplingParams

log = logging.getLogger(__name__)

BLOCK = 64  # tokens; prefixes are remembered in multiples of it
FAILED = 2**31  # load reported for a failed engine
MOST_BLOCKS = 2**16  # remembered, least recently used dropped first; 4 million tokens


def split_by_data(mesh: Mesh) -> list[Mesh]:
    """Return one mesh for each copy of the weights on a serving mesh.

    With several processes, return the mesh itself. Its devices then do the same work, because all
    processes take part whenever weights are published.
    """
    if jax.process_count() > 1:
        return [mesh]
    return [
        Mesh(mesh.devices[i : i + 1], mesh.axis_names, axis_types=mesh.axis_types)
        for i in range(mesh.shape["data"])
    ]


def replicate(make: Callable[[Any], Any], engines: Sequence[Any], slots: int) -> Any:
    """Make a loop for each engine, and return one loop over all of them."""
    loops = [make(engine) for engine in engines]
    if len(loops) == 1:
        return loops[0]
    log.info("serving the same weights on %d engines with %d slots each", len(loops), slots)
    return ReplicatedLoop(loops, slots)


class Router:
    """Choice of a replica by the prompts that each one has read. Every method is thread-safe."""

    def __init__(self, number: int, slots: int) -> None:
        self._slack = max(1, slots // 4)
        self._readers: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    def select(self, prompt: Sequence[int], loads: Sequence[int]) -> int:
        """Return the index of the replica to use. `loads` has each one's number of open requests.

        Prefer the replica that last read more than half of the prompt. If its load exceeds the
        smallest one by more than a quarter of its slots, use the least loaded replica.
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
        """Forget all prompts, because the caches were emptied."""
        with self._lock:
            self._readers.clear()


def _beginnings(prompt: Sequence[int]) -> list[int]:
    """Return hashes of the prompt's first block, its first two blocks, and so on."""
    found, last = [], 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        last = hash((last, *prompt[start : start + BLOCK]))
        found.append(last)
    return found


class ReplicatedLoop(LoopGroup):
    """Loops with the same weights behind the methods of one `EngineLoop`."""

    def __init__(self, loops: Sequence[EngineLoop], slots: int) -> None:
        super().__init__(loops)
        self._router = Router(len(loops), slots)

    def warmup(self) -> None:
        """Compile all programs, for all replicas in parallel. Call before `start`."""
        with ThreadPoolExecutor(len(self._loops)) as pool:
            list(pool.map(lambda loop: loop.warmup(), self._loops))

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: int | None = None,
        tenant: str | None = None,
    ) -> Generation:
        """Queue a request on one replica. See `EngineLoop.submit`."""
        # A failed loop is idle, so without this it would get every request.
        loads = [loop.num_open if loop.status != "failed" else FAILED for loop in self._loops]
        chosen = self._loops[self._router.select(prompt_ids, loads)]
        return chosen.submit(prompt_ids, sampling, adapter, tenant)

    def load_weights(self, params: Any | None, version: int) -> None:
        """Gather the weights once, and load them into one loop after another. See `EngineLoop`."""
        if params is not None:
            params = self._loops[0].spread(params)
        for loop in self._loops:
            loop.load_weights(params, version)
        if params is not None:
            self._router.forget()
