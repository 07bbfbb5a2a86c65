"""One loop over several policies, each with weights of its own."""

from collections.abc import Sequence

from lightning_jax.engine.generation import Generation
from lightning_jax.engine.loop_group import LoopGroup
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue


class LoopsByPolicy(LoopGroup):
    """Router from each request to the loop of its policy.

    Each loop has its own slots, prefix cache and weights, so no cached state crosses policies. The
    caller loads their weights.
    """

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: int | None = None,
        tenant: str | None = None,
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
        return self._loops[adapter].submit(prompt_ids, sampling, tenant=tenant)

    def stats(self) -> dict[str, float]:
        """Return the counters, summed over all loops."""
        shared = self._loops[0].stats()["serve/compiles"]  # counted by the engine of all loops
        return super().stats() | {"serve/compiles": shared}
