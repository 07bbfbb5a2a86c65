"""Tests that no token or key of a client gets into the log of its server."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.http.server import listen
from lightning_jax.gateway.http.server_log import server_logger

TOKEN = "r1~0123456789abcdef"
REQUESTS = {
    "header": f"GET /rollout/{TOKEN}/v1 HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\0\r\n\r\n",
    "version": f"GET /rollout/{TOKEN}/v1 HTTP/9.x\r\n\r\n",
    "method": f"G\1T /rollout/{TOKEN}/v1 HTTP/1.1\r\n\r\n",
    "url": f"GET http://[/rollout/{TOKEN}/v1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "long": f"GET /rollout/{TOKEN}/{'a' * 9000} HTTP/1.1\r\nHost: a\r\n\r\n",
    "length": f"POST /{TOKEN} HTTP/1.1\r\nHost: a\r\nContent-Length: x{TOKEN}\r\n\r\n",
    "lost": f"GET /lost/{TOKEN} HTTP/1.1\r\nHost: a\r\n\r\n",
    "bug": f"GET /bug/{TOKEN}?key={TOKEN} HTTP/1.1\r\nHost: a\r\n\r\n",
}


async def _lost(request: web.Request) -> web.Response:
    raise ConnectionError(request.path)


async def _bug(request: web.Request) -> web.Response:
    raise RuntimeError(request.path_qs)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    for found in server_logger().filters[:]:  # warns again
        server_logger().removeFilter(found)
    app = web.Application()
    app.router.add_get("/lost/{token}", _lost)
    app.router.add_get("/bug/{token}", _bug)
    runner = await listen(app, ServeConfig(host="127.0.0.1", port=0))
    yield runner.addresses[0][1]
    await runner.cleanup()


async def _send(port: int, request: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    answer = await reader.read(200)
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("name", REQUESTS)
async def test_no_text_of_a_request_is_logged(
    name: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await _send(port, REQUESTS[name])
    assert answer.split()[1] == (b"500" if name in ("lost", "bug") else b"400")
    assert [record.name for record in caplog.records if "server_log" in record.name]
    assert TOKEN not in caplog.text and TOKEN.partition("~")[2] not in caplog.text
    if name == "bug":
        assert "in _bug" in caplog.text and "RuntimeError" in caplog.text


async def test_requests_that_are_no_http_are_counted(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        await _send(port, REQUESTS["version"])
    assert len(caplog.records) == 1
