"""Server-sent events, as OpenAI streams them."""

import json
from typing import Any

from aiohttp import web

from lightning_jax.gateway.errors import ApiError


class EventStream:
    """The response of one streamed call; nothing is sent before `open`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    @property
    def is_open(self) -> bool:
        return self.response.prepared

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, body: dict[str, Any] | None) -> None:
        """Sends one event; None sends nothing. Raises ConnectionError if the client hung up."""
        if body is not None:
            await self.response.write(f"data: {json.dumps(body)}\n\n".encode())

    async def close(self) -> web.StreamResponse:
        """The finished response, with the mark of a complete stream."""
        await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()
        return self.response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """The response ended by an error event: its status went out before the error was known."""
        await self.send(error.body)
        await self.response.write_eof()
        return self.response
