"""Processes that Ray starts. Imports nothing heavy, so that samplers first get an environment."""

import asyncio
import collections
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning_jax.system.child_process import ChildProcess
from lightning_jax.system.text import plain_handler

KEPT_LINES = 40  # the last ones that a process of the trainer printed


class ClusterProcess:
    """Process in a cluster that reports its address.

    Its settings are named `cluster.{kind}s` and `cluster.{kind}_resources`.
    """

    kind: str

    async def ping(self) -> str:
        """Return the address at which other machines of the cluster reach this one."""
        return importlib.import_module("ray").util.get_node_ip_address()

    async def stop(self) -> None:
        """Stop the work of this process."""
        raise NotImplementedError


class SamplerActor(ClusterProcess):
    """Process of a `sampler.Sampler`."""

    kind = "sampler"

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
        """Build the sampler and start serving. Return its counters.

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

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the sampler returns."""
        return await getattr(self._sampler, method)(*arguments)

    async def stop(self) -> None:
        if self._sampler is not None:
            await self._sampler.stop()


class WorkerActor(ClusterProcess):
    """Process of a worker. It ends with `run`, or when the run kills it."""

    kind = "worker"

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


class TrainerActor(ClusterProcess):
    """Process of the trainer on a machine of the cluster. It ends with the actor."""

    kind = "trainer"

    def __init__(self) -> None:
        self._child: ChildProcess | None = None

    async def run(self, words: Sequence[str], directory: str) -> tuple[int, list[str]]:
        """Run Python with these arguments in `directory`.

        Return its exit status, or minus the signal that ended it, and its last lines.
        """
        self._child = ChildProcess(
            words,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        return await asyncio.to_thread(self._watch, self._child)

    async def stop(self) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                await self._child.end_async()

    @staticmethod
    def _watch(child: ChildProcess) -> tuple[int, list[str]]:
        """Pass on what the child prints, to Ray's logs, until it ends."""
        lines = collections.deque[str](maxlen=KEPT_LINES)
        assert child.popen.stdout is not None
        for line in child.popen.stdout:
            sys.stdout.write(line)
            lines.append(line.rstrip())
        return child.popen.wait(), list(lines)
