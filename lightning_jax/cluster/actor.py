"""Base of the processes that Ray starts, and the sampler. Imports nothing heavy before it has
its environment.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any


class ClusterProcess:
    """Process in a cluster, which says where it is."""

    async def ping(self) -> str:
        """Return the address of this machine at which the cluster's others reach it."""
        return importlib.import_module("ray").util.get_node_ip_address()


class SamplerActor(ClusterProcess):
    """Sampler behind Ray: each method is that of `sampler.Sampler`."""

    def __init__(self, environment: Sequence[str]) -> None:
        for variable in environment:
            name, _, value = variable.partition("=")
            os.environ[name] = value
        self._sampler: Any = None

    async def start(
        self,
        spec: Any,
        host: str,
        first_sequence: int,
        versions: Sequence[int],
        initial: Any,
        *weights: Any,
    ) -> dict[str, float]:
        """Build the sampler and start to serve. Return its counters.

        `weights` has two entries for each policy: all its weights, and changed ones or None.
        """
        import asyncio

        from lightning_jax.cluster.sampler import Sampler

        pairs = [
            [sent for sent in weights[2 * i : 2 * i + 2] if sent is not None]
            for i in range(len(versions))
        ]
        policies = list(zip(versions, pairs, strict=True))
        self._sampler = await asyncio.to_thread(
            Sampler, spec, host, first_sequence, policies, initial
        )
        return await self._sampler.start()

    async def open(self, settings: Any) -> Any:
        return self._sampler.open(settings)

    async def posted_reward(self, rollout_id: str) -> float | None:
        return self._sampler.posted_reward(rollout_id)

    async def lost(self, rollout_id: str) -> Any:
        return self._sampler.lost(rollout_id)

    async def expire(self, rollout_id: str) -> None:
        await self._sampler.expire(rollout_id)

    async def close_rollout(self, rollout_id: str) -> Any:
        return await self._sampler.close_rollout(rollout_id)

    async def load(self, index: int, version: int, sent: Any) -> int:
        return await self._sampler.load(index, sent, version)

    async def take(self, receipts: Any) -> Any:
        return await self._sampler.take(receipts)

    async def close(self) -> None:
        if self._sampler is not None:
            await self._sampler.close()
