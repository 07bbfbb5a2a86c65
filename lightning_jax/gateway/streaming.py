"""HTTP response of one streamed call."""

import asyncio
import json
from collections.abc import Iterable

from aiohttp import web

from lightning_jax.gateway.dialects.base import Dump, Event, Framing
from lightning_jax.gateway.offload import INLINE_BYTES

PIECE_BYTES = 64 * 2**10  # written at once


class EventStream:
    """Stream of events to a client. Nothing is sent before `open`."""

    def __init__(self, request: web.Request, framing: Framing) -> None:
        self._request = request
        self._framing = framing
        self._separator = framing.begin
        self._num_framed = 0
        self._held = b""
        self._num_unpaused = 0  # bytes written since others could run
        self.response = web.StreamResponse(
            headers={"Content-Type": framing.content_type, "Cache-Control": "no-cache"}
        )

    @property
    def is_open(self) -> bool:
        return self.response.prepared

    async def open(self) -> None:
        await self.response.prepare(self._request)

    def hold(self, events: Iterable[Event], dump: Dump = json.dumps) -> None:
        """Buffer the events and send them with the next ones, or at the end."""
        for event in events:
            self._held += self._separator + self._framing.frame(self._number(event), dump)
            self._separator = self._framing.between

    async def send(self, events: Iterable[Event]) -> None:
        """Send the events, if any. Raise ConnectionError if the client disconnected."""
        before = len(self._held)
        self.hold(events)
        if len(self._held) > before:
            await self._write()

    async def close(self) -> web.StreamResponse:
        """Send what is held and the end-of-stream mark, and return the finished response."""
        return await self._end(self._framing.end + self._framing.close)

    async def fail(self, event: Event) -> web.StreamResponse:
        """End the stream with an error event, because its status is already sent."""
        self.hold([event])
        return await self._end(self._framing.close)

    async def _end(self, mark: bytes) -> web.StreamResponse:
        if len(self._held) > PIECE_BYTES:
            await self._write()
        data, self._held = self._held, b""
        await self.response.write_eof(data + mark)
        return self.response

    async def _write(self) -> None:
        """Write what is held, and let others run after every few kilobytes.

        A client that begins to read again, or joins a call, has thousands of events waiting.
        """
        data, self._held = self._held, b""
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            await self.response.write(piece)
            self._num_unpaused += len(piece)
            if self._num_unpaused > INLINE_BYTES:
                self._num_unpaused = 0
                await asyncio.sleep(0)

    def _number(self, event: Event) -> Event:
        if not self._framing.numbered:
            return event
        self._num_framed += 1
        return Event({**event.data, "sequence_number": self._num_framed - 1}, event.name)
