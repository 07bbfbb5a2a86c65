"""Process that Ray starts for one process of the trainer."""

import asyncio
import collections
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from lightning_jax.cluster.actor import ClusterProcess
from lightning_jax.system.child_process import ChildProcess

KEPT_LINES = 40  # of what the process printed last


class TrainerActor(ClusterProcess):
    """Process of the trainer on a machine of the cluster. It ends with the actor."""

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
        """Let the process end."""
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
