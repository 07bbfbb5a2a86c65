"""Client of the calculator's MCP server, one process shared by all rollouts of an event loop.

Only the first rollout waits for a start. A server that dies, hangs or breaks MCP is killed, and a
new one serves the next calls. Calls in progress are retried, each on a separate server, so only a
call that breaks its own server fails.
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
END_LIMIT_S = 2.0  # for a killed server to exit
MAX_LINE_BYTES = 65_536  # per message from the server
_REQUEST_TIMEOUT = 408


class CalculatorBroken(ConnectionError):
    """Server that died, hung, did not start or broke MCP. The message has the details."""


@dataclass
class Usage:
    """Counters of this process's calculators."""

    starts: int = 0
    start_s: float = 0.0  # total time to start servers
    calls: int = 0
    call_s: float = 0.0  # total time in calls; concurrent calls add up
    broken: int = 0  # servers that had to be replaced


USAGE = Usage()


class Server:
    """One server process and its MCP session. One task opens and closes both, as anyio requires."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._fault = ""  # reason for the end of the server's output
        self.tools: list[Tool] = []
        self.pid = 0  # of the process, also its process group
        self._keeper = asyncio.create_task(self._keep())

    async def open(self) -> None:
        """Wait for the server's tools. Raises CalculatorBroken."""
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
        """Return the tool's answer, including errors of the tool. Raises CalculatorBroken.

        A lone surrogate, which a model may write and MCP cannot carry, becomes a question mark.
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
        except Exception as error:  # noqa: BLE001  (a foreign program may break MCP in any way)
            self._fault = self._fault or f"{type(error).__name__}: {error}"
        if not self._opened.done():
            self._opened.set_exception(CalculatorBroken(f"did not start: {self._fault}"))
            self._opened.exception()  # mark it as retrieved, because no caller may be waiting

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
        """Forward the server's lines until its output ends or a line is not a message.

        Closing the stream tells the session, and so fails all pending calls.
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
            with contextlib.suppress(ConnectionError):  # its output ends then, too
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()


@asynccontextmanager
async def _process(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the program in its own process group, and kill the whole group at the end."""
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
        # communicate() also reads leftover output. asyncio waits until an output it stopped
        # reading closes, and a child in another group could keep it open.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), END_LIMIT_S)


class Calculator:
    """Server shared by all rollouts of one event loop, replaced when it breaks."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self.server: Server | None = None
        self._starting: asyncio.Task[Server] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # closing the replaced servers

    async def tool(self) -> Tool:
        """Return the server's first tool. Raises CalculatorBroken."""
        server = await self._shared()
        if not server.tools:
            raise CalculatorBroken("the server offers no tool")
        return server.tools[0]

    async def call_tool(self, name: str, arguments: dict[str, Any] | None = None) -> CallToolResult:
        """Return the tool's answer. Raises CalculatorBroken if this call breaks its server."""
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
        """End the server. The next call would start another one."""
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
            self._ending.add(task)  # asyncio keeps no strong reference to tasks
            task.add_done_callback(self._ending.discard)


_CALCULATORS: WeakKeyDictionary[asyncio.AbstractEventLoop, Calculator] = WeakKeyDictionary()


def shared_calculator() -> Calculator:
    """Return the running event loop's calculator.

    Its server starts at the first use and ends with the loop.
    """
    loop = asyncio.get_running_loop()
    if loop not in _CALCULATORS:
        _CALCULATORS[loop] = Calculator(COMMAND)
    return _CALCULATORS[loop]
