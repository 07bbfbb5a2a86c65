"""Workers of a run that Ray places on machines."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from lightning_jax.cluster.actor import WorkerActor
from lightning_jax.cluster.placing import end_actors, last_line, result_of, start_actor
from lightning_jax.rollouts.workers.pool import OtherMachines, StartedWorker
from lightning_jax.train.config import ClusterConfig

log = logging.getLogger(__name__)

END_S = 5.0  # for a worker to give its rollouts back


def workers_in_cluster(ray: Any, config: ClusterConfig, run: str) -> OtherMachines:
    """Return what starts the workers of a run, whose name in the cluster is `run`."""

    @asynccontextmanager
    async def start(index: int, settings: dict[str, Any]) -> AsyncIterator[StartedWorker]:
        actor, host = await start_actor(ray, config, WorkerActor, index, run)
        log.info("worker %d runs agents at %s", index, host)
        running = actor.run.remote(settings | {"sys_path": sys.path})
        end = asyncio.create_task(_end_of(running, ray))
        try:
            yield StartedWorker(end, partial(ray.kill, actor))
        finally:
            end.cancel()
            await end_actors(ray, [actor], END_S)

    return OtherMachines(config.workers, start)


async def _end_of(running: Any, ray: Any) -> tuple[str, dict[str, Any] | None]:
    try:
        return "ended", await result_of(running)
    except ray.exceptions.RayError as lost:
        return f"was lost: {last_line(lost)}", None
