"""The HTTP response of one streamed call."""

from collections.abc import Iterable

from aiohttp import web

from lightning_jax.gateway.dialects.base import Event, Framing


class EventStream:
    """Events on their way to the client; nothing is sent before `open`."""

    def __init__(self, request: web.Request, framing: Framing) -> None:
        self._request = request
        self._framing = framing
        self._separator = framing.begin
        self._num_sent = 0
        self.response = web.StreamResponse(
            headers={"Content-Type": framing.content_type, "Cache-Control": "no-cache"}
        )

    @property
    def is_open(self) -> bool:
        return self.response.prepared

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, events: Iterable[Event]) -> None:
        """Sends the events in one write. Raises ConnectionError if the client hung up."""
        data = b""
        for event in events:
            data += self._separator + self._framing.frame(self._number(event))
            self._separator = self._framing.between
        if data:
            await self.response.write(data)

    async def close(self) -> web.StreamResponse:
        """The finished response, with the mark of a complete stream."""
        await self.response.write_eof(self._framing.end + self._framing.close)
        return self.response

    async def fail(self, event: Event) -> web.StreamResponse:
        """The response ended by an error event: its status went out before the error was known."""
        await self.send([event])
        await self.response.write_eof(self._framing.close)
        return self.response

    def _number(self, event: Event) -> Event:
        if not self._framing.numbered:
            return event
        self._num_sent += 1
        return Event({**event.data, "sequence_number": self._num_sent - 1}, event.name)
