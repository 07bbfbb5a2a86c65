"""HTTP response of one streamed call."""

from collections.abc import Iterable

from aiohttp import web

from lightning_jax.gateway.dialects.base import Event, Framing


class EventStream:
    """Stream of events to a client. Nothing is sent before `open`."""

    def __init__(self, request: web.Request, framing: Framing) -> None:
        self._request = request
        self._framing = framing
        self._separator = framing.begin
        self._num_framed = 0
        self._held = b""
        self.response = web.StreamResponse(
            headers={"Content-Type": framing.content_type, "Cache-Control": "no-cache"}
        )

    @property
    def is_open(self) -> bool:
        return self.response.prepared

    async def open(self) -> None:
        await self.response.prepare(self._request)

    def hold(self, events: Iterable[Event]) -> None:
        """Buffer the events and send them with the next ones, or at the end."""
        for event in events:
            self._held += self._separator + self._framing.frame(self._number(event))
            self._separator = self._framing.between

    async def send(self, events: Iterable[Event]) -> None:
        """Send the events, if any. Raise ConnectionError if the client disconnected."""
        before = len(self._held)
        self.hold(events)
        if len(self._held) > before:
            await self.response.write(self._taken())

    async def close(self, events: Iterable[Event]) -> web.StreamResponse:
        """Send the last events and the end-of-stream mark, and return the finished response."""
        self.hold(events)
        await self.response.write_eof(self._taken() + self._framing.end + self._framing.close)
        return self.response

    async def fail(self, event: Event) -> web.StreamResponse:
        """End the stream with an error event, because its status is already sent."""
        self.hold([event])
        await self.response.write_eof(self._taken() + self._framing.close)
        return self.response

    def _taken(self) -> bytes:
        data, self._held = self._held, b""
        return data

    def _number(self, event: Event) -> Event:
        if not self._framing.numbered:
            return event
        self._num_framed += 1
        return Event({**event.data, "sequence_number": self._num_framed - 1}, event.name)
