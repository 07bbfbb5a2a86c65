"""Processes that Ray starts. Imports nothing heavy, so that samplers first get an environment."""

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning_jax.system.text import plain_handler


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
        *weights: Any,
    ) -> dict[str, float]:
        """Build the sampler and start to serve. Return its counters.

        `weights` has two entries for each policy: all its weights, and changed ones or None.
        """
        from lightning_jax.cluster.sampler import Sampler

        pairs = [
            [sent for sent in weights[2 * i : 2 * i + 2] if sent is not None]
            for i in range(len(versions))
        ]
        sets = list(zip(versions, pairs, strict=True))
        self._sampler = await asyncio.to_thread(Sampler, spec, host, first_sequence, sets)
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


class WorkerActor(ClusterProcess):
    """Process that Ray starts for a worker. It ends with `run`, or when the run kills it."""

    def __init__(self) -> None:
        self._running: asyncio.Task[Any] | None = None

    async def run(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Take and run rollouts until `stop`. Return the error of an agent that is unusable."""
        from lightning_jax.rollouts.workers.worker import run_from_settings

        sys.path += [path for path in settings["sys_path"] if path not in sys.path]
        logging.basicConfig(level=logging.WARNING, handlers=[plain_handler()])
        self._running = asyncio.create_task(run_from_settings(settings))
        try:
            return await self._running
        except asyncio.CancelledError:
            return None

    async def stop(self) -> None:
        """Give running rollouts back and end `run`."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
