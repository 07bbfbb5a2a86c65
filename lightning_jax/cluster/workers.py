"""Workers of a run that Ray places on machines, and starts again if they die."""

import asyncio
import logging
from typing import Any

from lightning_jax.cluster.config import ClusterConfig
from lightning_jax.cluster.placing import Kind, last_line, place, result, wait_to_end
from lightning_jax.cluster.worker_actor import WorkerActor
from lightning_jax.gateway.sessions.leases import LeaseQueue
from lightning_jax.rollouts.local_workers import unusable
from lightning_jax.settings import ConfigError

log = logging.getLogger(__name__)

END_S = 5.0  # for a worker to give its rollouts back
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0  # before a worker is started again


class WorkerSilent(Exception):
    """Silence of a worker that may still run."""


class ClusterWorkers:
    """Workers of one run in a Ray cluster."""

    def __init__(self, ray: Any, config: ClusterConfig, run: str) -> None:
        """`run` names the run in the cluster."""
        self._ray, self._run, self.number = ray, run, config.workers
        self._kind = Kind(
            "worker", WorkerActor, config.workers, config.resources("worker"), config.timeout_s
        )

    async def keep(self, index: int, settings: dict[str, Any], queue: LeaseQueue) -> None:
        """Run a worker, and start it again whenever it is lost or silent. If cancelled, end it.

        If the cluster has no room or the agent is unusable, all that waits for a worker fails.
        """
        delay_s = FIRST_DELAY_S
        while True:
            try:
                actor, host = await place(self._ray, self._kind, index, self._run)
            except ConfigError as error:
                queue.fail(error)
                return
            log.info("worker %d runs agents at %s", index, host)
            try:
                error = await _unless_silent(actor.run.remote(settings), settings["name"], queue)
            except WorkerSilent:
                continue
            except self._ray.exceptions.RayError as lost:
                why = last_line(lost)
            except asyncio.CancelledError:
                await self._stop(actor)
                raise
            else:
                assert error is not None, "a worker runs until it is stopped"
                queue.fail(unusable(error))
                return
            finally:
                self._ray.kill(actor)
            queue.drop(settings["name"], f"was lost: {why}")
            log.warning(
                "worker %d was lost: %s; its rollouts are tried again, and another is started",
                *(index, why),
                extra={"event": "worker_lost", "worker": index},
            )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _stop(self, actor: Any) -> None:
        stopping = asyncio.wrap_future(actor.stop.remote().future())
        await wait_to_end([stopping], END_S)


async def _unless_silent(running: Any, name: str, queue: LeaseQueue) -> dict[str, Any] | None:
    """Return the error of an agent that is unusable. Raises WorkerSilent if its worker is silent.

    Errors of Ray are raised, too.
    """
    ended = asyncio.create_task(result(running))
    silent = asyncio.create_task(queue.silence(name))
    try:
        await asyncio.wait({ended, silent}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            raise WorkerSilent
        return ended.result()
    finally:
        ended.cancel()
        silent.cancel()
