"""The calculator's MCP server: one process that all rollouts of an event loop share.

A rollout never waits for a start but the first. A server that dies, hangs or writes what is not MCP
is killed and another one serves the next calls; the calls that were under way are tried again, each
on a server of its own, so that only a call which breaks its server by itself fails.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import anyio
from mcp import ClientSession, McpError
from mcp.shared.message import SessionMessage
from mcp.types import CONNECTION_CLOSED, CallToolResult, JSONRPCMessage, TextContent, Tool

COMMAND = (sys.executable, str(Path(__file__).with_name("calculator_server.py")))
START_LIMIT_S = 30.0
CALL_LIMIT_S = 5.0
END_LIMIT_S = 2.0  # for the remains of a killed server
MAX_LINE_BYTES = 65_536  # of one message of the server's
_REQUEST_TIMEOUT = 408


class CalculatorBroken(ConnectionError):
    """The server died, hung, did not start or wrote what is not MCP; the message says which."""


@dataclass
class Usage:
    """What the calculators of this process did so far."""

    starts: int = 0
    start_s: float = 0.0  # spent on starting servers
    calls: int = 0
    call_s: float = 0.0  # spent on calls, added up over rollouts that wait at once
    broken: int = 0  # servers that had to be replaced


USAGE = Usage()


class Server:
    """One server process and its MCP session, which one task opens and closes, as anyio asks."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._fault = ""  # why the server's output ended
        self.tools: list[Tool] = []
        self.pid = 0  # of its process, which leads a process group of that number
        self._keeper = asyncio.create_task(self._keep())

    async def open(self) -> None:
        """Waits for the tools. Raises CalculatorBroken."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await asyncio.shield(self._opened)
        except TimeoutError:
            await self.close()
            raise CalculatorBroken(f"no answer within {START_LIMIT_S:g} s of the start") from None
        finally:
            USAGE.starts += 1
            USAGE.start_s += time.monotonic() - started

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Return the tool's answer, errors of the tool included. Raises CalculatorBroken.

        Half a character, which a model may write and MCP cannot carry, becomes a question mark.
        """
        if self._fault:
            raise CalculatorBroken(self._fault)
        whole = json.dumps([name, arguments], ensure_ascii=False).encode("utf-8", "replace")
        name, arguments = json.loads(whole)
        try:
            session, limit = self._opened.result(), timedelta(seconds=CALL_LIMIT_S)
            return await session.call_tool(name, arguments, read_timeout_seconds=limit)
        except McpError as error:
            if error.error.code == _REQUEST_TIMEOUT:
                raise CalculatorBroken(f"no answer within {CALL_LIMIT_S:g} s") from None
            if error.error.code == CONNECTION_CLOSED or self._fault:
                raise CalculatorBroken(self._fault or "the server closed its output") from None
            text = TextContent(type="text", text=error.error.message)
            return CallToolResult(content=[text], isError=True)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, RuntimeError) as error:
            raise CalculatorBroken(f"the session is over ({type(error).__name__})") from error

    async def close(self) -> None:
        self._closing.set()
        if not self._opened.done():
            self._keeper.cancel()
        await asyncio.wait([self._keeper])

    async def _keep(self) -> None:
        try:
            async with _process(self._command) as process, self._session(process) as session:
                self.pid = process.pid
                await session.initialize()
                self.tools = (await session.list_tools()).tools
                self._opened.set_result(session)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001  (whatever a foreign program makes of MCP)
            self._fault = self._fault or f"{type(error).__name__}: {error}"
        if not self._opened.done():
            self._opened.set_exception(CalculatorBroken(f"did not start: {self._fault}"))
            self._opened.exception()  # seen, though nobody may wait for it any more

    @asynccontextmanager
    async def _session(self, process: asyncio.subprocess.Process) -> AsyncIterator[ClientSession]:
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        limit = timedelta(seconds=START_LIMIT_S)
        async with anyio.create_task_group() as group, incoming, read, write, outgoing:
            group.start_soon(self._receive, process, incoming)
            group.start_soon(self._send, process, outgoing)
            async with ClientSession(read, write, read_timeout_seconds=limit) as session:
                yield session
            group.cancel_scope.cancel()

    async def _receive(self, process: asyncio.subprocess.Process, incoming: Any) -> None:
        """Passes the server's lines on; its end, or the first one that is no message, is the last.

        Closing the stream is what tells the session, and with it all who wait for an answer.
        """
        assert process.stdout is not None
        async with incoming:
            try:
                while line := await process.stdout.readline():
                    message = JSONRPCMessage.model_validate_json(line)
                    await incoming.send(SessionMessage(message))
                self._fault = "the server ended"
            except ValueError as error:  # not a message, or a line over the limit
                self._fault = f"the server wrote what is not MCP ({type(error).__name__})"

    async def _send(self, process: asyncio.subprocess.Process, outgoing: Any) -> None:
        assert process.stdin is not None
        async for item in outgoing:
            line = item.message.model_dump_json(by_alias=True, exclude_none=True)
            with contextlib.suppress(ConnectionError):  # then its output ends, too
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()


@asynccontextmanager
async def _process(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program in a process group of its own, all of which is killed at the end."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        limit=MAX_LINE_BYTES,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Reads what it had written, too: asyncio waits for the end of an output that it stopped
        # reading, which a child in another group could keep open.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), END_LIMIT_S)


class Calculator:
    """The server that all rollouts of one event loop share, replaced when it breaks."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self.server: Server | None = None
        self._starting: asyncio.Task[Server] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # of servers that were replaced

    async def tool(self) -> Tool:
        """What the server offers first. Raises CalculatorBroken."""
        server = await self._shared()
        if not server.tools:
            raise CalculatorBroken("the server offers no tool")
        return server.tools[0]

    async def call_tool(self, name: str, arguments: dict[str, Any] | None = None) -> CallToolResult:
        """The tool's answer. Raises CalculatorBroken when this call breaks its server."""
        started = time.monotonic()
        try:
            server = await self._shared()
            try:
                return await server.call(name, arguments or {})
            except CalculatorBroken:
                self._replace(server)
            return await self._call_alone(name, arguments or {})
        finally:
            USAGE.calls += 1
            USAGE.call_s += time.monotonic() - started

    async def close(self) -> None:
        """Ends the server; the next call would start another."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self.server is not None:
            server, self.server = self.server, None
            await server.close()
        await asyncio.gather(*self._ending)

    async def _call_alone(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        server = Server(self._command)
        try:
            await server.open()
            return await server.call(name, arguments)
        finally:
            await server.close()

    async def _shared(self) -> Server:
        if self.server is not None:
            return self.server
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Server:
        try:
            server = Server(self._command)
            await server.open()
            self.server = server
            return server
        finally:
            self._starting = None

    def _replace(self, broken: Server) -> None:
        if self.server is broken:
            self.server = None
            USAGE.broken += 1
            task = asyncio.create_task(broken.close())
            self._ending.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self._ending.discard)


_CALCULATORS: WeakKeyDictionary[asyncio.AbstractEventLoop, Calculator] = WeakKeyDictionary()


def shared_calculator() -> Calculator:
    """The running event loop's calculator; its server starts with the first use of it, and ends
    with the loop.
    """
    loop = asyncio.get_running_loop()
    if loop not in _CALCULATORS:
        _CALCULATORS[loop] = Calculator(COMMAND)
    return _CALCULATORS[loop]
