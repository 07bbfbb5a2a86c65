"""Processes of one trainer, which train together and are restarted together.

JAX runs the processes as one program: when one dies, the others end as well. A supervisor, which
trains nothing itself, starts process 0 on its own machine and lets Ray place the others. When one
dies, it ends the rest and starts all of them again. They resume from the newest checkpoint.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning_jax.cluster.actor import TrainerActor
from lightning_jax.cluster.placing import end_actors, last_line, result_of, start_actor
from lightning_jax.cluster.ray_session import ClusterError
from lightning_jax.system.child_process import ChildProcess
from lightning_jax.system.network import free_port
from lightning_jax.system.process_state import handle_stop_signals
from lightning_jax.train.config import ClusterConfig

log = logging.getLogger(__name__)

MAX_DEATHS = 3  # in a row, without a checkpoint between them
END_S = 30.0  # for the other processes to end after process 0
BLAME_S = 30.0  # after an error, for Ray to notice the loss of the process that caused it
POLL_S = 0.1

# (process, address of process 0, address of the cluster) -> arguments of Python
CommandLine = Callable[[int, str, str], Sequence[str]]


@dataclass(frozen=True)
class ProcessExit:
    """Exit of one process: its status, or None if it is lost, and why."""

    index: int
    status: int | None
    why: str = ""

    @property
    def is_death(self) -> bool:
        """Return True if the process was killed, also by an abort of JAX."""
        return self.status is None or self.status < 0

    @property
    def is_loss(self) -> bool:
        """Return True if it was killed, and not by an abort of JAX."""
        return self.is_death and self.status != -signal.SIGABRT


def find_cause(exits: Sequence[ProcessExit]) -> ProcessExit:
    """Return the exit that explains the others: a loss, else an error, else an abort of JAX.

    Ties go to the first, so pass them in order. If no process failed, return the exit of process 0.
    """

    def rank(end: ProcessExit) -> int:
        if end.status == 0:
            return 4 if end.index else 3
        return 0 if end.is_loss else 2 if end.is_death else 1

    return min(exits, key=rank)


class Trainers:
    """Trainer of several processes, in a Ray cluster."""

    def __init__(
        self,
        ray: Any,
        config: ClusterConfig,
        run: str,
        command_line: CommandLine,
        newest_checkpoint: Callable[[], int],
    ) -> None:
        """`run` names the run in the cluster. `newest_checkpoint` is -1 if there is none."""
        self._ray, self._config, self._run = ray, config, run
        self._command_line = command_line
        self._newest_checkpoint = newest_checkpoint
        self._leader: ChildProcess | None = None
        self._signals = 0

    async def run(self) -> int:
        """Train to the end, and return the exit status of process 0.

        Raises ClusterError if processes die again and again, or one but process 0 has an error.
        """
        deaths, checkpoint = 0, self._newest_checkpoint()
        with self._signals_go_to_the_leader():
            while True:
                last = await self._train_once()
                if not last.is_death:
                    return self._status(last)
                if self._signals:
                    return 130
                newest = self._newest_checkpoint()
                deaths = 1 if newest > checkpoint else deaths + 1
                checkpoint = newest
                if deaths >= MAX_DEATHS:
                    raise ClusterError(
                        f"the trainer died {deaths} times in a row without a new checkpoint, last "
                        f"its process {last.index} ({last.why}); check its memory, or lower "
                        "checkpoint.every.",
                        reason="trainer_lost",
                        key="cluster.trainers",
                    )
                log.warning(
                    "trainer process %d died (%s); all %d start again from %s",
                    *(last.index, last.why, self._config.trainers),
                    f"the checkpoint of step {newest}" if newest >= 0 else "the beginning",
                    extra={"event": "trainer_lost", "trainer": last.index},
                )

    def _status(self, last: ProcessExit) -> int:
        assert last.status is not None, "the process ended by itself"
        if last.index:
            raise ClusterError(
                f"trainer process {last.index} ended with an error: {last.why}",
                reason="trainer_failed",
                key="cluster.trainers",
            )
        return last.status

    async def _train_once(self) -> ProcessExit:
        """Run all processes until one ends, and return the exit that explains the others."""
        async with self._started() as running:
            ends, waiting = list[ProcessExit](), set(running)
            while not any(end.index == 0 or end.status != 0 for end in ends):
                ends += await _next_ends(waiting)
            if any(end.index == 0 and end.status == 0 for end in ends):
                await asyncio.wait(running, timeout=END_S)
            elif waiting and not any(end.is_loss for end in ends):
                # The loss of a process is soon an error or an abort in the others.
                ends += await _next_ends(waiting, asyncio.ALL_COMPLETED, BLAME_S)
            return find_cause(ends)

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[list[asyncio.Task[ProcessExit]]]:
        """Start all processes. At the end of the context, end those that still run."""
        ray, directory = self._ray, os.getcwd()
        address = ray.get_runtime_context().gcs_address
        host = ray.util.get_node_ip_address()
        coordinator = f"{host}:{free_port(host)}"
        actors = list[Any]()
        tasks = list[asyncio.Task[ProcessExit]]()
        try:
            for index in range(1, self._config.trainers):
                actor, where = await start_actor(ray, self._config, TrainerActor, index, self._run)
                actors.append(actor)
                log.info("trainer process %d is at %s", index, where)
            self._leader = ChildProcess(self._command_line(0, coordinator, address), cwd=directory)
            tasks.append(asyncio.create_task(self._leader_exit(self._leader)))
            for index, actor in enumerate(actors, 1):
                words = self._command_line(index, coordinator, address)
                call = actor.run.remote(words, directory)
                tasks.append(asyncio.create_task(self._actor_exit(index, call)))
            yield tasks
        finally:
            leader, self._leader = self._leader, None
            if leader is not None:
                await leader.end_async()
            await end_actors(ray, actors, END_S)
            if tasks:
                await asyncio.wait(tasks)

    async def _leader_exit(self, leader: ChildProcess) -> ProcessExit:
        while (status := leader.popen.poll()) is None:
            await asyncio.sleep(POLL_S)
        return ProcessExit(0, status, _reason(status))

    async def _actor_exit(self, index: int, call: Any) -> ProcessExit:
        try:
            status, lines = await result_of(call)
        except self._ray.exceptions.RayError as lost:
            return ProcessExit(index, None, last_line(lost))
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        return ProcessExit(index, status, _reason(status) if status < 0 else last)

    @contextmanager
    def _signals_go_to_the_leader(self) -> Iterator[None]:
        """Pass SIGINT and SIGTERM on to process 0, which then saves and ends the others.

        Before there is a process 0, the first one cancels.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "a coroutine runs in a task"

        def stop(number: int, frame: FrameType | None) -> None:
            self._signals += 1
            leader = self._leader
            if leader is not None:
                leader.popen.send_signal(signal.SIGTERM)
            else:
                loop.call_soon_threadsafe(task.cancel)

        with handle_stop_signals(stop):
            yield


async def _next_ends(
    waiting: set[asyncio.Task[ProcessExit]],
    until: str = asyncio.FIRST_COMPLETED,
    timeout_s: float | None = None,
) -> list[ProcessExit]:
    """Wait for ends, take them out of `waiting`, and return them by process."""
    done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=until)
    waiting -= done
    return sorted((task.result() for task in done), key=lambda end: end.index)


def _reason(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"
