"""Client of MCP servers over standard input and output, without a package for the protocol.

    async with open_server("uvx mcp-server-time") as server:
        server.functions  # the tools, as `tools` of a chat completion
        result = await server.call("get_current_time", '{"timezone": "Etc/UTC"}')

A server is a foreign program. Its messages, its time and what it prints are bounded, and all its
processes are killed at the end.
"""

import asyncio
import contextlib
import itertools
import json
import re
import shlex
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from lightning_jax.system.child_process import kill_group
from lightning_jax.system.text import in_one_line

PROTOCOL = "2025-06-18"  # version of MCP
MAX_PAGES = 100  # of a list of tools
MAX_TOOLS = 1000
MAX_OTHER_LINES = 100  # of output that are no messages, such as a greeting
MAX_ERROR_BYTES = 4096  # of the standard error, from its end
END_LIMIT_S = 1.0  # for a server to exit by itself after its input is closed
METHOD_NOT_FOUND = -32601


class ServerBroken(ConnectionError):
    """Server that died, hung, did not start or broke MCP. The message has the details."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server."""

    start_s: float = 60.0
    call_s: float = 30.0
    line_bytes: int = 4 * 2**20  # of one message
    result_chars: int = 4000  # of a result, as the model reads it


@dataclass(frozen=True)
class ToolResult:
    """Answer of a tool. `content` has the parts as the server sent them."""

    text: str
    is_error: bool
    content: Sequence[Mapping[str, Any]] = ()


class Server:
    """Running server. Calls may run at once."""

    def __init__(self, process: asyncio.subprocess.Process, limits: ServerLimits) -> None:
        self._process, self._limits = process, limits
        self._numbers = itertools.count(1)  # of requests; a late answer finds none
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._errors = bytearray()  # end of the standard error
        self._other: deque[bytes] = deque(maxlen=1)  # last line that is no message
        self._num_other = 0
        self._fault = ""  # reason for the end of the server's messages
        self._readers = [asyncio.create_task(self._receive()), asyncio.create_task(self._drain())]
        self.pid = process.pid  # also its process group
        self.tools: list[dict[str, Any]] = []  # as the server sent them
        self._names: dict[str, str] = {}  # of tools, by names of functions

    @property
    def functions(self) -> list[Any]:
        """Tools as chat completions have them. Names have no other marks than _ and -."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": str(tool.get("description") or tool.get("title") or ""),
                    "parameters": tool["inputSchema"],
                },
            }
            for name, tool in zip(self._names, self.tools, strict=True)
        ]

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolResult:
        """Return a tool's answer, which may be an error for the model to read.

        `arguments` may be JSON, as a model wrote it. Raises ServerBroken.
        """
        try:
            values = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, Mapping):
            return ToolResult("Error: the arguments are not a JSON object.", is_error=True)
        sent = {"name": self._names.get(name, name), "arguments": values}
        try:
            answer = await self._request("tools/call", sent, self._limits.call_s)
        except _Refused as error:
            answer = {"isError": True, "content": [{"type": "text", "text": str(error)}]}
        content = answer.get("content")
        parts = [p for p in content if isinstance(p, dict)] if isinstance(content, list) else []
        text = "\n".join(map(_text_of, parts)) or json.dumps(answer.get("structuredContent", ""))
        return ToolResult(
            text[: self._limits.result_chars], answer.get("isError") is True, tuple(parts)
        )

    async def close(self) -> None:
        """End the server: by itself if it is sound, else at once. No process is left."""
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        if not self._fault:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_LIMIT_S)
        kill_group(process.pid)
        for reader in self._readers:
            reader.cancel()
        await asyncio.wait(self._readers)
        # communicate() also reads leftover output. asyncio waits until an output it stopped
        # reading closes, and a child in another group could keep it open.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), END_LIMIT_S)

    async def initialize(self) -> None:
        """Agree on the protocol and list the tools. Raises ServerBroken."""
        client = {"name": "lightning_jax", "version": "1"}
        hello = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        try:
            async with asyncio.timeout(self._limits.start_s):
                await self._request("initialize", hello, None)
                await self._send({"method": "notifications/initialized"})
                cursor: dict[str, Any] = {}
                for _ in range(MAX_PAGES):
                    page = await self._request("tools/list", cursor, None)
                    self._add_tools(page.get("tools"))
                    cursor = {"cursor": page.get("nextCursor")}
                    if not cursor["cursor"]:
                        break
        except TimeoutError:
            text = f"no answer within {self._limits.start_s:g} s of the start"
            raise ServerBroken(text + self._last_words()) from None
        except _Refused as error:
            raise ServerBroken(f"it refused to start: {error}") from None

    def _add_tools(self, tools: Any) -> None:
        for tool in tools if isinstance(tools, list) else []:
            is_usable = isinstance(tool, dict) and isinstance(tool.get("name"), str)
            if not is_usable or not isinstance(tool.get("inputSchema"), dict):
                raise ServerBroken("a tool has no name or no inputSchema")
            name = re.sub(r"[^\w-]", "_", tool["name"], flags=re.ASCII)[:64]
            if name in self._names or len(self.tools) == MAX_TOOLS:
                raise ServerBroken(f"it has two tools {name}, or more than {MAX_TOOLS}")
            self._names[name] = tool["name"]
            self.tools.append(tool)

    async def _request(
        self, method: str, params: Mapping[str, Any], limit_s: float | None
    ) -> dict[str, Any]:
        """Return the result of a request. Raises ServerBroken, or _Refused for an error."""
        if self._fault:
            raise ServerBroken(self._fault)
        number = next(self._numbers)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_s):
                await self._send({"id": number, "method": method, "params": params})
                answer = await future
        except TimeoutError:
            raise ServerBroken(f"no answer within {limit_s:g} s") from None
        finally:
            del self._pending[number]
        if "error" in answer:
            error = answer["error"]
            text = error.get("message") if isinstance(error, dict) else error
            raise _Refused(str(text)[: self._limits.result_chars])
        result = answer.get("result")
        return result if isinstance(result, dict) else {}

    async def _send(self, message: Mapping[str, Any]) -> None:
        """Write a message. A lone surrogate, which a model may write, becomes a question mark."""
        assert self._process.stdin is not None
        line = json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False)
        with contextlib.suppress(ConnectionError):  # its output ends then, too
            self._process.stdin.write(line.encode("utf-8", "replace") + b"\n")
            await self._process.stdin.drain()

    async def _receive(self) -> None:
        """Read messages until the output ends. Then fail all pending requests."""
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                await self._handle(line)
            with contextlib.suppress(TimeoutError):  # its last words
                await asyncio.wait_for(asyncio.shield(self._readers[1]), END_LIMIT_S)
            self._fault = "the server ended" + self._last_words()
        except ValueError:  # a line over the limit
            self._fault = "the server wrote what is not MCP" + self._last_words()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ServerBroken(self._fault))

    async def _handle(self, line: bytes) -> None:
        """Pass an answer on, and answer a request. Raises ValueError for too much else."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            self._other.append(line)
            self._num_other += bool(line.strip())
            if self._num_other > MAX_OTHER_LINES:
                raise ValueError("too many lines that are no messages")
            return
        number = message.get("id")
        if "method" not in message:
            future = self._pending.get(number) if isinstance(number, int) else None
            if future is not None and not future.done():
                future.set_result(message)
        elif number is not None:
            missing = {"code": METHOD_NOT_FOUND, "message": "the client has no such method"}
            is_ping = message["method"] == "ping"
            await self._send({"id": number} | ({"result": {}} if is_ping else {"error": missing}))

    async def _drain(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(MAX_ERROR_BYTES):
            self._errors += chunk
            del self._errors[:-MAX_ERROR_BYTES]

    def _last_words(self) -> str:
        """Return what the server printed last, in brackets, or nothing."""
        lines = bytes(self._errors).decode("utf-8", "replace").strip().splitlines()
        lines = lines or [line.decode("utf-8", "replace").strip() for line in self._other]
        text = in_one_line(lines[-1], 200) if lines else ""
        return f" ({text})" if text else ""


class _Refused(Exception):
    """Request that the server answered with an error."""


@asynccontextmanager
async def open_server(
    command: str | Sequence[str], limits: ServerLimits = ServerLimits()
) -> AsyncIterator[Server]:
    """Start a server, yield it with its tools, and end it. Raises ServerBroken."""
    server = await start_server(command, limits)
    try:
        yield server
    finally:
        await server.close()


async def start_server(
    command: str | Sequence[str], limits: ServerLimits = ServerLimits()
) -> Server:
    """Return a server that has listed its tools. The caller closes it. Raises ServerBroken."""
    pipe = asyncio.subprocess.PIPE
    try:
        words = shlex.split(command) if isinstance(command, str) else command
        process = await asyncio.create_subprocess_exec(
            *(words or [""]),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=limits.line_bytes,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a quote without an end
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ServerBroken(f"it did not start ({reason})") from error
    server = Server(process, limits)
    try:
        await server.initialize()
    except BaseException:
        await server.close()
        raise
    return server


def _text_of(part: Mapping[str, Any]) -> str:
    """Return a part of a result as text."""
    resource = part.get("resource")
    for text in (part.get("text"), resource.get("text") if isinstance(resource, dict) else None):
        if isinstance(text, str):
            return text
    return f"[{part.get('type')}]"
