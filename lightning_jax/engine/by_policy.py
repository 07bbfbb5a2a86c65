"""One loop over several policies, each with weights of its own."""

from collections.abc import Sequence

from lightning_jax.engine.admission import LoopStatus, join_statuses
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.generation import Generation
from lightning_jax.engine.response import TimeLimit
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue

SHARED = ("serve/compiles", "serve/compiling")  # counted by the programs, which all loops share


class LoopsByPolicy:
    """Router from each request to the loop of its policy.

    Each loop has its own slots, prefix cache and weights, so no cached state crosses policies. The
    caller starts and closes the loops and loads their weights.
    """

    def __init__(self, loops: Sequence[Engine]) -> None:
        self._loops, first = tuple(loops), loops[0]
        self.model_name, self.tokenizer, self.serve = first.model_name, first.tokenizer, first.serve

    @property
    def version(self) -> int:
        """Weights version that will answer the next request. It is the same for all loops."""
        return self._loops[0].version

    @property
    def status(self) -> LoopStatus:
        """Status like `EngineLoop.status`: the first loop status that is not ok, if any."""
        return join_statuses(loop.status for loop in self._loops)

    @property
    def num_slots(self) -> int:
        """Number of requests that all loops together decode at once."""
        return sum(loop.num_slots for loop in self._loops)

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """Compile a grammar for all loops. See `EngineLoop.prepare`."""
        await self._loops[0].prepare(grammar, owner)

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: int | None = None,
        tenant: str | None = None,
        time_limit: TimeLimit | None = None,
        call: str | None = None,
    ) -> Generation:
        """Queue a request on the loop with index `adapter`. See `EngineLoop.submit`.

        Raises ValueError if there is no such loop.
        """
        if adapter is None or not 0 <= adapter < len(self._loops):
            raise InvalidValue(
                f"adapter is {adapter}; must be 0 to {len(self._loops) - 1}",
                reason="unknown",
                key="adapter",
            )
        loop = self._loops[adapter]
        return loop.submit(prompt_ids, sampling, tenant=tenant, time_limit=time_limit, call=call)

    def stats(self) -> dict[str, float]:
        """Return the counters, summed over all loops."""
        first, *others = (loop.stats() for loop in self._loops)
        totals = {name: sum((stats[name] for stats in others), first[name]) for name in first}
        return totals | {name: first[name] for name in SHARED if name in first}
