"""Several engine loops behind the methods of one."""

import asyncio
from collections.abc import Sequence

from lightning_jax.engine.admission import LoopStatus
from lightning_jax.engine.loop import EngineLoop


class LoopGroup:
    """Loops behind the methods of one `EngineLoop`.

    A subclass selects the loop of each request in `submit`.
    """

    def __init__(self, loops: Sequence[EngineLoop]) -> None:
        self._loops = tuple(loops)

    @property
    def version(self) -> int:
        """Weights version that will answer the next request."""
        return self._loops[-1].version

    @property
    def status(self) -> LoopStatus:
        """Status like `EngineLoop.status`: the first one that is not "ok", if any."""
        others: list[LoopStatus] = [loop.status for loop in self._loops if loop.status != "ok"]
        return others[0] if others else "ok"

    @property
    def num_slots(self) -> int:
        """Number of requests that all loops together decode at once."""
        return sum(loop.num_slots for loop in self._loops)

    @property
    def num_open(self) -> int:
        """Number of requests running or waiting."""
        return sum(loop.num_open for loop in self._loops)

    def start(self) -> None:
        """Start the threads."""
        for loop in self._loops:
            loop.start()

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """Compile a grammar for all loops. See `EngineLoop.prepare`."""
        await self._loops[0].prepare(grammar, owner)

    async def drain(self) -> None:
        """Refuse new requests, and return when none is open."""
        await asyncio.gather(*(loop.drain() for loop in self._loops))

    def close(self) -> None:
        """Stop the threads. Unfinished requests fail with EngineError."""
        for loop in self._loops:
            loop.close()

    def stats(self) -> dict[str, float]:
        """Return the counters, summed over all loops."""
        found = [loop.stats() for loop in self._loops]
        return {name: sum(stats[name] for stats in found) for name in found[0]}
