"""Choice between replicas of one engine's weights on separate devices.

The replicas' prefix caches are separate, so a request goes to the replica that has read the start
of its prompt before.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

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
            readers, numbers = self._readers, reversed(range(len(beginnings)))
            longest = next((i for i in numbers if beginnings[i] in readers), -1)
            chosen = least
            if 2 * (longest + 1) * BLOCK > len(prompt):
                reader = readers[beginnings[longest]]
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
    hashes, last = [], 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        last = hash((last, *prompt[start : start + BLOCK]))
        hashes.append(last)
    return hashes
