"""Limits on the server's connections: their number, and how long an idle or slow one lasts.

A connection is idle, receiving a request, or busy with a complete one. Above
`serve.max_connections`, a new connection evicts another. The first to go is one that never sent a
request, then the one that was idle longest, but never a busy one. So connections that do nothing
cannot block new ones.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

from aiohttp import web

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.http.server_log import ExhaustionLog, NowAndThen
from lightning_jax.system.descriptors import number_free

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Any]


def number_that_fits(limit: int) -> int:
    """Return the connection limit, with half of the free file descriptors left for agents."""
    return max(1, min(limit, number_free() // 2))


class State(Enum):
    """State of a connection. The first two may be evicted, in this order."""

    SILENT = auto()  # never sent a request
    IDLE = auto()
    BUSY = auto()


class Connections:
    """Open connections of a server. Calling it returns the protocol for the next connection.

    `on_close` is called for each connection that is closed by a limit. Use it only in the event
    loop's thread.
    """

    def __init__(
        self,
        make_handler: Callable[[], asyncio.Protocol],
        serve: ServeConfig,
        on_close: Callable[[], None],
    ) -> None:
        self._make_handler, self._serve, self._on_close = make_handler, serve, on_close
        self.limit = number_that_fits(serve.max_connections)
        if self.limit < serve.max_connections:
            log.info(
                "limiting to %d connections because of the open-file limit (ulimit -Hn)", self.limit
            )
        # By state, in the order in which they entered it, so that an eviction needs no search.
        self._open: dict[State, dict[Any, Connection]] = {state: {} for state in State}
        self._warnings = NowAndThen()
        self.num_evicted = self.num_refused = 0

    def __call__(self) -> asyncio.Protocol:
        return Connection(self, self._make_handler())

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    async def track(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Protect a connection from eviction from its complete request until the answer."""
        transport = request.transport
        connection = next((t[transport] for t in self._open.values() if transport in t), None)
        if connection is None:  # already closed
            return await handler(request)
        connection.ask()
        request.content.on_eof(partial(self._begin, connection))
        try:
            return await handler(request)
        finally:
            connection.rest()
            self._change(connection, State.IDLE)

    def _begin(self, connection: "Connection") -> None:
        """Mark a connection as busy, now that the body of its request is complete."""
        connection.receiving_since = None
        if connection.idle_since is None:
            self._change(connection, State.BUSY)

    def _change(self, connection: "Connection", state: State) -> None:
        """Set the state of a connection, unless it is closed."""
        if self.remove(connection):
            connection.state = state
            self._open[state][connection.transport] = connection

    def add(self, connection: "Connection") -> bool:
        """Add a connection, and evict another if necessary. Return False if there is no room."""
        if len(self) >= self.limit:
            states = (State.SILENT, State.IDLE)
            victim = next((c for state in states for c in self._open[state].values()), None)
            self._on_close()
            self._warn(evicted=victim is not None)
            if victim is None:
                return False
            self.remove(victim)
            victim.transport.abort()
        self._open[connection.state][connection.transport] = connection
        return True

    def remove(self, connection: "Connection") -> bool:
        """Forget a connection. Return whether it was open."""
        return self._open[connection.state].pop(connection.transport, None) is not None

    def sweep(self) -> None:
        """Close connections that have been idle or slow for too long."""
        now = time.monotonic()
        for connection in [c for table in self._open.values() for c in table.values()]:
            slow = now - (connection.receiving_since or now) > self._serve.slow_request_s
            still_since = connection.unread_since or connection.idle_since
            idle = now - (still_since or now) > self._serve.idle_connection_s
            if slow and not idle:  # an idle client would not read the error
                connection.transport.write(_too_slow(self._serve.slow_request_s))
                connection.transport.close()
            elif idle:
                connection.transport.abort()
            if slow or idle:
                self.remove(connection)
                self._on_close()

    def _warn(self, evicted: bool) -> None:
        self.num_evicted += evicted
        self.num_refused += not evicted
        if self._warnings.are_due():
            log.warning(
                "%d connections are open, which is the limit; closed %d idle and %d new ones so "
                "far. If these are your agents', raise serve.max_connections (%d) or `ulimit -n`.",
                *(len(self), self.num_evicted, self.num_refused, self._serve.max_connections),
            )


class Connection(asyncio.Protocol):
    """One connection, which forwards everything to the HTTP protocol."""

    def __init__(self, table: Connections, handler: asyncio.Protocol) -> None:
        self._table, self._handler = table, handler
        self._is_open = False
        self.state = State.SILENT
        self.idle_since: float | None = None  # set while no request is being handled
        self.receiving_since: float | None = None  # set while a request is arriving
        self.unread_since: float | None = None  # set while the client does not read

    def ask(self) -> None:
        """Note that a request has arrived, perhaps without its body."""
        self.idle_since = None
        self.receiving_since = self.receiving_since or time.monotonic()

    def rest(self) -> None:
        """Note that the request has been answered."""
        self.idle_since = time.monotonic()

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport
        self.rest()
        self._is_open = self._table.add(self)
        if self._is_open:
            self._handler.connection_made(transport)
        else:  # clients see a connection error, which never counts as the agent's failure
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        if self._is_open:
            self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_open:
            if self.idle_since is not None and self.receiving_since is None:
                self.receiving_since = time.monotonic()
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._is_open else None

    def pause_writing(self) -> None:
        self.unread_since = time.monotonic()
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self.unread_since = None
        self._handler.resume_writing()


class GuardedRunner(web.AppRunner):
    """aiohttp runner that enforces this module's limits on connections."""

    def __init__(
        self,
        app: web.Application,
        serve: ServeConfig,
        on_close: Callable[[], None],
        **settings: Any,
    ) -> None:
        super().__init__(app, **settings)
        app.middlewares.insert(0, self._track)  # before all others
        self._serve, self._on_close = serve, on_close
        self.connections: Connections | None = None

    @property
    def server(self) -> Any:
        """Factory of the protocol for each new connection."""
        return super().server if self.connections is None else self.connections

    async def setup(self) -> None:
        """Prepare to serve."""
        await super().setup()
        make_handler = super().server
        assert make_handler is not None, "it is set up"
        self.connections = Connections(make_handler, self._serve, self._on_close)
        self._exhaustion = ExhaustionLog(asyncio.get_running_loop())
        self._sweeping = asyncio.create_task(self._sweep())

    async def cleanup(self) -> None:
        """Close all connections and stop watching them."""
        if self.connections is not None:
            self._sweeping.cancel()
            self._exhaustion.close()
        await super().cleanup()

    @web.middleware
    async def _track(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self.connections is not None, "a request came"
        return await self.connections.track(request, handler)

    async def _sweep(self) -> None:
        assert self.connections is not None, "it is set up"
        shortest = min(self._serve.idle_connection_s, self._serve.slow_request_s)
        while True:
            await asyncio.sleep(min(1.0, shortest / 4))
            self.connections.sweep()


def _too_slow(limit_s: float) -> bytes:
    message = (
        f"the request was not complete within {limit_s:g} s; for slow clients, raise "
        "serve.slow_request_s."
    )
    error = {"message": message, "type": "invalid_request_error", "code": "request_timeout"}
    body = json.dumps({"error": error}).encode()
    head = (
        "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
