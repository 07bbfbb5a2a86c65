"""Tests of the agent on Ollama's client against a test double of its API."""

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

ollama_chat = pytest.importorskip("ollama_chat", exc_type=ImportError)

TASK = {"id": "s0", "question": "What is 17 + 25?", "answer": 42}


@pytest.mark.parametrize(
    ("replies", "result"),
    [
        (["Answer: 42"], {"reward": 1.0, "replies": 1}),
        (["It is 42.", "Answer: 42"], {"reward": 0.5, "replies": 2}),
    ],
)
async def test_it_finds_the_api_beside_openais(
    replies: list[str], result: dict[str, float]
) -> None:
    bodies: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        message = {"role": "assistant", "content": replies[len(bodies) - 1]}
        return web.json_response({"model": "policy", "message": message, "done": True})

    app = web.Application()
    app.router.add_post("/rollout/r1/api/chat", chat)
    async with TestServer(app) as server:
        url = str(server.make_url("/rollout/r1/v1"))
        assert await ollama_chat.run(TASK, LLM(url)) == result
    assert [len(body["messages"]) for body in bodies] == [4, 6][: len(replies)]


class LLM:
    """Argument that the runner passes to agents."""

    api_key = "secret"
    model = "policy"

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
