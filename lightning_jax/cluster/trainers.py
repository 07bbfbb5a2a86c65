"""Processes of one trainer, which train together and are restarted together.

JAX runs the processes as one program: when one dies, the others end as well. A supervisor, which
trains nothing itself, starts process 0 on its own machine and lets Ray place the others. When one
dies, it ends the rest and starts all of them again. They resume from the newest checkpoint.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning_jax.cluster.placing import Kind, last_line, place, result, wait_to_end
from lightning_jax.cluster.ray_session import ClusterError
from lightning_jax.cluster.trainer_actor import TrainerActor
from lightning_jax.system.child_process import ChildProcess
from lightning_jax.system.network import free_port
from lightning_jax.system.process_state import handle_stop_signals
from lightning_jax.train.config import ClusterConfig

log = logging.getLogger(__name__)

MAX_DEATHS = 3  # in a row, without a checkpoint between them
END_S = 30.0  # for the other processes to end after process 0
BLAME_S = 30.0  # after an error, for Ray to notice the loss of the process that caused it
POLL_S = 0.1


@dataclass(frozen=True)
class CommandLines:
    """Command lines of the trainer's processes."""

    # (process, address of process 0, address of the cluster) -> arguments of Python
    of: Callable[[int, str, str], Sequence[str]]
    directory: str  # in which they run


@dataclass(frozen=True)
class End:
    """End of one process: its exit status, or None if it is lost, and why."""

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


def cause(ends: Sequence[End]) -> End:
    """Return the end that explains the others: a loss, else an error, else an abort of JAX.

    Of equal ones it is the first, so pass them in their order. If none failed, it is process 0's.
    """

    def rank(end: End) -> int:
        if end.status == 0:
            return 4 if end.index else 3
        return 0 if end.is_loss else 2 if end.is_death else 1

    return min(ends, key=rank)


class Trainers:
    """Trainer of several processes, in a Ray cluster."""

    def __init__(
        self,
        ray: Any,
        config: ClusterConfig,
        run: str,
        words: CommandLines,
        newest_checkpoint: Callable[[], int],
    ) -> None:
        """`run` names the run in the cluster. `newest_checkpoint` is -1 if there is none."""
        self._ray, self._run, self._words = ray, run, words
        self._newest_checkpoint = newest_checkpoint
        number = config.trainers - 1
        self._kind = Kind(
            "trainer", TrainerActor, number, config.resources("trainer"), config.timeout_s
        )
        self._leader: ChildProcess | None = None
        self._signals = 0

    async def run(self) -> int:
        """Train to the end, and return the exit status of process 0.

        Raises ClusterError if processes die again and again, or one but process 0 has an error.
        """
        deaths, checkpoint = 0, self._newest_checkpoint()
        with self._signals_go_to_the_leader():
            while True:
                ended = await self._train_once()
                if not ended.is_death:
                    return self._status(ended)
                if self._signals:
                    return 130
                newest = self._newest_checkpoint()
                deaths = 1 if newest > checkpoint else deaths + 1
                checkpoint = newest
                if deaths >= MAX_DEATHS:
                    raise ClusterError(
                        f"the trainer died {deaths} times in a row without a new checkpoint, last "
                        f"its process {ended.index} ({ended.why}); check its memory, or lower "
                        "checkpoint.every.",
                        reason="trainer_lost",
                        key="cluster.trainers",
                    )
                log.warning(
                    "trainer process %d died (%s); all %d start again from %s",
                    *(ended.index, ended.why, self._kind.number + 1),
                    f"the checkpoint of step {newest}" if newest >= 0 else "the beginning",
                    extra={"event": "trainer_lost", "trainer": ended.index},
                )

    def _status(self, ended: End) -> int:
        assert ended.status is not None, "the process ended by itself"
        if ended.index:
            raise ClusterError(
                f"trainer process {ended.index} ended with an error: {ended.why}",
                reason="trainer_failed",
                key="cluster.trainers",
            )
        return ended.status

    async def _train_once(self) -> End:
        """Run all processes until one ends, and return the end that explains the others."""
        async with self._started() as running:
            ends, waiting = list[End](), set(running)
            while not any(end.index == 0 or end.status != 0 for end in ends):
                ends += await _next_ends(waiting)
            if any(end.index == 0 and end.status == 0 for end in ends):
                await wait_to_end(running, END_S)
            elif waiting and not any(end.is_loss for end in ends):
                # The loss of a process is soon an error or an abort in the others.
                ends += await _next_ends(waiting, asyncio.ALL_COMPLETED, BLAME_S)
            return cause(ends)

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[list[asyncio.Task[End]]]:
        """Start all processes. At the end of the context, end those that still run."""
        ray, directory = self._ray, self._words.directory
        address = ray.get_runtime_context().gcs_address
        host = ray.util.get_node_ip_address()
        coordinator = f"{host}:{free_port(host)}"
        actors = list[Any]()
        tasks = list[asyncio.Task[End]]()
        try:
            for index in range(1, self._kind.number + 1):
                actor, where = await place(ray, self._kind, index, self._run)
                actors.append(actor)
                log.info("trainer process %d is at %s", index, where)
            self._leader = ChildProcess(self._words.of(0, coordinator, address), cwd=directory)
            tasks.append(asyncio.create_task(self._leader_end(self._leader)))
            for index, actor in enumerate(actors, 1):
                words = self._words.of(index, coordinator, address)
                asked = actor.run.remote(words, directory)
                tasks.append(asyncio.create_task(self._end(index, asked)))
            yield tasks
        finally:
            leader, self._leader = self._leader, None
            if leader is not None:
                await leader.end_async()
            stopping = [asyncio.wrap_future(actor.stop.remote().future()) for actor in actors]
            if stopping:
                await wait_to_end(stopping, END_S)
            for actor in actors:
                ray.kill(actor)
            if tasks:
                await asyncio.wait(tasks)

    async def _leader_end(self, leader: ChildProcess) -> End:
        while (status := leader.popen.poll()) is None:
            await asyncio.sleep(POLL_S)
        return End(0, status, _reason(status))

    async def _end(self, index: int, asked: Any) -> End:
        try:
            status, lines = await result(asked)
        except self._ray.exceptions.RayError as lost:
            return End(index, None, last_line(lost))
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        return End(index, status, _reason(status) if status < 0 else last)

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
    waiting: set[asyncio.Task[End]],
    until: str = asyncio.FIRST_COMPLETED,
    timeout_s: float | None = None,
) -> list[End]:
    """Wait for ends, take them out of `waiting`, and return them by process."""
    done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=until)
    waiting -= done
    return sorted((task.result() for task in done), key=lambda end: end.index)


def _reason(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"
