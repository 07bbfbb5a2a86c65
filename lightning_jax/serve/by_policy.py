"""Loops of policies that have weights of their own, as one that knows each policy by its place."""

from collections.abc import Sequence

from lightning_jax.serve.generation import Generation
from lightning_jax.serve.intake import LoopStatus, together
from lightning_jax.serve.loop import EngineLoop
from lightning_jax.types import InvalidValue, SamplingParams

SHARED = ("serve/compiles",)  # counts of the engine, whose programs all loops run


class LoopsByPolicy:
    """Hands each request to its policy's loop, which has slots, a prefix cache and weights of its
    own: nothing that one policy computed can reach another. Starting and ending the loops, and
    their weights, are the business of who made them.
    """

    def __init__(self, loops: Sequence[EngineLoop]) -> None:
        self._loops = tuple(loops)

    @property
    def status(self) -> LoopStatus:
        """As `EngineLoop.status`; not ok as soon as one loop is not."""
        return together(loop.status for loop in self._loops)

    @property
    def num_slots(self) -> int:
        """Return how many requests all loops decode at once."""
        return sum(loop.num_slots for loop in self._loops)

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """As `EngineLoop.prepare`, for all loops."""
        await self._loops[0].prepare(grammar, owner)

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: int | None = None,
        tenant: str | None = None,
    ) -> Generation:
        """As `EngineLoop.submit`; `adapter` is the policy's place. ValueError where there is none
        of it.
        """
        if adapter is None or not 0 <= adapter < len(self._loops):
            raise InvalidValue(
                f"the policy's place is {adapter}; expected 0 to {len(self._loops) - 1}.",
                reason="unknown",
                key="adapter",
            )
        return self._loops[adapter].submit(prompt_ids, sampling, tenant=tenant)

    def stats(self) -> dict[str, float]:
        """The counters of all loops together."""
        found = [loop.stats() for loop in self._loops]
        together = {name: sum(stats[name] for stats in found) for name in found[0]}
        return together | {name: found[0][name] for name in SHARED}
