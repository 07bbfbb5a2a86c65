"""Test double of an OpenAI-compatible server that returns the given replies in order."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class Script:
    # A text or whole message, the HTTP status of a failure, or None to never answer.
    replies: list[str | dict[str, Any] | int | None]
    base_url: str = ""
    api_key: str = "secret"
    model: str = "policy"
    prompts: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    other_paths: list[str] = field(default_factory=list)

    @property
    def agents(self) -> list[str]:
        """Names of the calling agents, in order."""
        return [headers["x-agent-name"] for headers in self.headers]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        reply = self.replies[len(self.bodies) - 1]
        if reply is None:
            await asyncio.Event().wait()
        if isinstance(reply, int):
            error = {"message": "scripted failure", "type": "server_error", "code": None}
            return web.json_response(
                {"error": error}, status=reply, headers={"x-should-retry": "false"}
            )
        message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        if self.bodies[-1].get("stream"):
            return await _stream(request, message, reason)
        return web.json_response(
            {
                "id": f"chatcmpl-{len(self.bodies)}",
                "object": "chat.completion",
                "created": 1,
                "model": "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )

    async def not_found(self, request: web.Request) -> web.Response:
        self.other_paths.append(request.path)
        return web.json_response({}, status=404)


async def _stream(request: web.Request, message: dict[str, Any], reason: str) -> web.StreamResponse:
    """Answer with a stream of one chunk."""
    choice = {"index": 0, "delta": message, "finish_reason": reason}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def calling(name: str, arguments: str, *, text: str | None = None) -> dict[str, Any]:
    """Return an assistant message with one tool call. `arguments` may be invalid JSON."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": text, "tool_calls": calls}


@asynccontextmanager
async def serving(
    replies: Sequence[str | dict[str, Any] | int | None],
) -> AsyncIterator[Script]:
    """Run the server, and yield an object that agents accept as `llm`."""
    script = Script(list(replies))
    app = web.Application()
    app.router.add_post("/rollout/r1/v1/chat/completions", script.complete)
    app.router.add_route("*", "/{rest:.*}", script.not_found)
    async with TestServer(app, handler_cancellation=True) as server:
        script.base_url = str(server.make_url("/rollout/r1/v1"))
        yield script
