"""Changes of runs as server-sent events. One poll of the files serves all clients."""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import web

from lightning_jax.studio.live.catalog import Catalog, Stamp
from lightning_jax.studio.live.lanes import Lane

POLL_S = 1.0
SCAN_S = 10.0  # between two searches for new runs
HEARTBEAT_S = 15.0  # without a change, so that a dead connection is noticed


class Watch:
    """State of all runs as a number that grows with each change, and a poll while clients listen.

    Use it only in one event loop.
    """

    def __init__(self, catalog: Catalog, lane: Lane, poll_s: float = POLL_S) -> None:
        self._catalog, self._lane, self._poll_s = catalog, lane, poll_s
        self._stamps: dict[str, Stamp] = {}
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._epoch = secrets.token_hex(4)  # numbers of another server mean something else
        self._scanned_at = time.monotonic()
        self._version = 0
        self.numbers: dict[str, int] = {}  # of changes, by run
        self.num_clients = 0
        self.num_polls = 0

    @property
    def event_id(self) -> str:
        return f"{self._epoch}-{self._version}"

    async def follow(self, request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
        """Send the numbers of all runs, and again after each change, until the client leaves.

        A client that reconnects gets the numbers of now, and so learns of all that it missed.
        """
        response = web.StreamResponse(
            headers={**headers, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        self.num_clients += 1
        try:
            if not self.numbers:
                await self._poll()
            if self._task is None:
                self._task = asyncio.create_task(self._run())
            await self._send_changes(response)
        finally:
            self.num_clients -= 1
            if self.num_clients == 0:
                await self.close()
        return response

    async def _send_changes(self, response: web.StreamResponse) -> None:
        while True:
            sent = self.event_id
            data = json.dumps({"runs": self.numbers})
            await response.write(f"id: {sent}\nevent: change\ndata: {data}\n\n".encode())
            while not await self._wait_for_change(sent):
                await response.write(b": still here\n\n")

    async def _wait_for_change(self, sent: str) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S), self._changed:
                await self._changed.wait_for(lambda: self.event_id != sent)
                return True
        return False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self._poll()

    async def _poll(self) -> None:
        stamps = await self._lane.run(self._read, is_admitted=True)
        self.num_polls += 1
        if stamps == self._stamps:
            return
        self.numbers = {
            key: self.numbers.get(key, 0) + (stamp != self._stamps.get(key))
            for key, stamp in stamps.items()
        }
        self._stamps = stamps
        self._version += 1
        async with self._changed:
            self._changed.notify_all()

    def _read(self) -> dict[str, Stamp]:
        now = time.monotonic()
        if now - self._scanned_at >= SCAN_S:
            self._scanned_at = now
            self._catalog.scan()
        return {run.key: run.stamp() for run in self._catalog.runs()}

    async def close(self) -> None:
        """Stop the poll."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
