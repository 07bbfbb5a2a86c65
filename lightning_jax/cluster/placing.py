"""Processes that Ray starts on the machines of a cluster."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_jax.cluster.actor import ClusterProcess
from lightning_jax.cluster.ray_session import actor_options, room_in_words
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import ClusterConfig

FREED_S = 30.0  # for the name of a process that has just ended


async def start_actor(
    ray: Any,
    config: ClusterConfig,
    process: type[ClusterProcess],
    index: int,
    run: str,
    *arguments: Any,
) -> tuple[Any, str]:
    """Start one process and return it and the address of its machine, once Ray has placed it.

    Raises ConfigError if another run of this name has it, or the cluster is too small.
    """
    kind = process.kind
    resources = config.resources(kind)
    actor = await _create(ray, process, f"{run}/{kind}-{index}", resources, arguments)
    try:
        async with asyncio.timeout(config.timeout_s):
            return actor, await result_of(actor.ping.remote())
    except BaseException as error:
        ray.kill(actor)
        if not isinstance(error, (TimeoutError, ray.exceptions.RayError)):
            raise
        amounts = ", ".join(f"{name} {number:g}" for name, number in resources.items())
        raise ConfigError(
            f"cluster.{kind}s={getattr(config, f'{kind}s')} with {amounts} each do not fit the "
            f"cluster, which is {room_in_words(ray, resources)}; lower it or "
            f"cluster.{kind}_resources, or add machines.",
            reason="too_small",
            key=f"cluster.{kind}s",
        ) from error


async def _create(
    ray: Any,
    process: type[ClusterProcess],
    name: str,
    resources: Mapping[str, float],
    arguments: Sequence[Any],
) -> Any:
    """Ask Ray for a process. Raises ConfigError if another run has its name."""
    until = time.monotonic() + FREED_S
    actor = ray.remote(process).options(
        name=name, scheduling_strategy="SPREAD", **actor_options(resources)
    )
    while True:
        try:
            return actor.remote(*arguments)
        except ValueError as error:  # the name is taken, perhaps by one that is just ending
            if time.monotonic() > until:
                raise ConfigError(
                    f"{name} belongs to another run in this cluster; stop that run, or set another "
                    "run_dir.",
                    reason="claimed",
                    key="run_dir",
                ) from error
        await asyncio.sleep(0.5)


async def end_actors(ray: Any, actors: Sequence[Any], timeout_s: float) -> None:
    """Ask processes to stop, wait for at most `timeout_s`, then kill them.

    Errors while they stop are ignored.
    """
    stopping = [result_of(actor.stop.remote()) for actor in actors]
    try:
        if stopping:
            await asyncio.wait(stopping, timeout=timeout_s)
    finally:
        for stop in stopping:
            if not stop.cancel() and not stop.cancelled():  # it has ended
                stop.exception()  # retrieved, or asyncio would log it
        for actor in actors:
            ray.kill(actor)


def result_of(call: Any) -> asyncio.Future[Any]:
    """Return the future result of a call to one of these processes."""
    return asyncio.wrap_future(call.future())


def last_line(error: BaseException) -> str:
    """Return the last line of an error from Ray, which has the cause after its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else repr(error))[:300]
