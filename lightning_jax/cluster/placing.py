"""Processes that Ray starts on the machines of a cluster."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.cluster.actor import ClusterProcess
from lightning_jax.cluster.ray_session import actor_options, room_in_words
from lightning_jax.settings import ConfigError

FREED_S = 30.0  # for the name of a process that has just ended


@dataclass(frozen=True)
class Kind:
    """Kind of process that a run asks for, such as its samplers.

    Settings are named `cluster.{plural}` and `cluster.{name}_resources`.
    """

    name: str
    actor: type[ClusterProcess]
    number: int
    resources: Mapping[str, float]
    timeout_s: float  # for the cluster to have room

    @property
    def plural(self) -> str:
        return f"{self.name}s"


async def place(ray: Any, kind: Kind, index: int, run: str, *arguments: Any) -> tuple[Any, str]:
    """Start one process and return it and the address of its machine, once Ray has placed it.

    Raises ConfigError if another run of this name has it, or the cluster is too small.
    """
    actor = await _create(ray, kind, index, run, arguments)
    try:
        async with asyncio.timeout(kind.timeout_s):
            return actor, await result(actor.ping.remote())
    except BaseException as error:
        ray.kill(actor)
        if not isinstance(error, (TimeoutError, ray.exceptions.RayError)):
            raise
        asked = ", ".join(f"{name} {number:g}" for name, number in kind.resources.items())
        raise ConfigError(
            f"{kind.number} {kind.plural} with {asked} each do not fit the cluster, which is "
            f"{room_in_words(ray, kind.resources)}; lower cluster.{kind.plural} or "
            f"cluster.{kind.name}_resources, or add machines.",
            reason="too_small",
            key=f"cluster.{kind.plural}",
        ) from error


async def _create(ray: Any, kind: Kind, index: int, run: str, arguments: tuple[Any, ...]) -> Any:
    """Ask Ray for a process. Raises ConfigError if another run has its name."""
    name, until = f"{run}/{kind.name}-{index}", time.monotonic() + FREED_S
    made = ray.remote(kind.actor).options(
        name=name, scheduling_strategy="SPREAD", **actor_options(kind.resources)
    )
    while True:
        try:
            return made.remote(*arguments)
        except ValueError as error:  # the name is taken, perhaps by one that is just ending
            if time.monotonic() > until:
                raise ConfigError(
                    f"{kind.name} {index} of {run} belongs to another run in this cluster; stop "
                    "that run, or set another run_dir.",
                    reason="claimed",
                    key="run_dir",
                ) from error
        await asyncio.sleep(0.5)


async def result(asked: Any) -> Any:
    """Return the result of a call to one of these processes."""
    return await asyncio.wrap_future(asked.future())


async def wait_to_end(ending: Sequence[asyncio.Future[Any]], timeout_s: float) -> None:
    """Wait until processes have ended, or the time is over. Whether they could does not matter."""
    done, late = await asyncio.wait(ending, timeout=timeout_s)
    for end in done:
        end.exception()  # retrieved, or asyncio would log it
    for end in late:
        end.cancel()


def last_line(error: BaseException) -> str:
    """Return the last line of an error from Ray, which has the cause after its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else repr(error))[:300]
