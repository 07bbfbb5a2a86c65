"""Process that Ray starts for a worker, which runs agents."""

import asyncio
import logging
import sys
from typing import Any

from lightning_jax.cluster.actor import ClusterProcess
from lightning_jax.system.text import plain_handler


class WorkerActor(ClusterProcess):
    """Worker behind Ray. It ends with its method `run`, or when the run kills it."""

    def __init__(self) -> None:
        self._running: asyncio.Task[Any] | None = None

    async def run(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Take and run rollouts until `stop`. Return the error of an agent that is unusable."""
        from lightning_jax.rollouts.worker import run_from_settings

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
