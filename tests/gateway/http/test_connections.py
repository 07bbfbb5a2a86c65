"""Tests that idle or slow connections block nobody and last no longer than the settings allow."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientConnectionError, ClientSession, web
from gateway_bench import Bench, MakeBench

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.http.connections import number_that_fits
from lightning_jax.gateway.http.server import MAX_ACCEPTED, listen, reachable_url
from lightning_jax.gateway.http.server_log import ExhaustionLog
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.system import descriptors
from lightning_jax.train.config import Config

ASK = {"model": "policy", "max_tokens": 2, "messages": [{"role": "user", "content": "?"}]}
SLOW_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer right-key\r\n"


async def ask(bench: Bench) -> int:
    """Return the status of one honest call."""
    url = f"{bench.gateway.url}/v1/chat/completions"
    headers = {"Authorization": "Bearer right-key"}
    async with bench.http.post(url, json=ASK, headers=headers) as answer:
        await answer.read()
        return answer.status


@asynccontextmanager
async def opened(bench: Bench, number: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Open this many connections that send nothing, and yield their reading ends."""
    address = urlsplit(bench.gateway.url)
    made = [await asyncio.open_connection(address.hostname, address.port) for _ in range(number)]
    try:
        yield [reader for reader, _ in made]
    finally:
        for _, writer in made:
            writer.close()


async def sent(bench: Bench, data: bytes) -> bytes:
    """Send these bytes and return everything that the server answers until it closes."""
    address = urlsplit(bench.gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


async def test_silent_connections_make_room_for_an_honest_agent(make_bench: MakeBench) -> None:
    async with make_bench(max_connections=8) as bench:
        assert await ask(bench) == 200  # its connection is kept
        async with opened(bench, 40) as silent:
            assert [await ask(bench) for _ in range(3)] == [200] * 3
            ends = [asyncio.create_task(reader.read()) for reader in silent]
            done, waiting = await asyncio.wait(ends, timeout=2)
            assert len(waiting) <= 8 and {await end for end in done} == {b""}
            for end in waiting:
                end.cancel()
        assert bench.gateway.stats()["serve/closed_connections"] >= 32
        assert len(bench.http.connector._conns) == 1  # type: ignore[union-attr]


async def test_busy_connections_never_make_room() -> None:
    answered, started = asyncio.Event(), []

    async def hold(request: web.Request) -> web.Response:
        started.append(request)
        await answered.wait()
        return web.Response(text="held")

    app = web.Application()
    app.router.add_get("/", hold)
    runner = await listen(app, ServeConfig(max_connections=4))
    url = reachable_url(runner.addresses[0])
    async with ClientSession() as http:

        async def call() -> int:
            async with http.get(url) as answer:
                return answer.status

        calls = [asyncio.create_task(call()) for _ in range(4)]
        while len(started) < 4:
            await asyncio.sleep(0.01)
        with pytest.raises(ClientConnectionError):
            await call()
        answered.set()
        assert await asyncio.gather(*calls) == [200] * 4
        assert await call() == 200
    await runner.cleanup()


async def test_clients_that_arrive_together_are_queued() -> None:
    """Open more connections than one iteration of the loop accepts, while the loop is blocked."""
    runner = await listen(web.Application(), ServeConfig())
    with contextlib.ExitStack() as opened:
        for _ in range(4 * MAX_ACCEPTED):
            opened.enter_context(socket.create_connection(runner.addresses[0], timeout=0.5))
    await runner.cleanup()


async def test_half_requests_make_room_for_an_honest_agent(make_bench: MakeBench) -> None:
    async with make_bench(max_connections=4) as bench:
        half = SLOW_HEAD + b"Content-Length: 9\r\n\r\n{"
        held = [asyncio.create_task(sent(bench, half)) for _ in range(8)]
        await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        assert [await ask(bench) for _ in range(3)] == [200] * 3
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_connection_without_a_request_is_closed_in_time(make_bench: MakeBench) -> None:
    async with make_bench(idle_connection_s=0.3) as bench:
        assert await sent(bench, b"") == b""
        whole = SLOW_HEAD + b"Content-Length: 2\r\n\r\n{}"
        answer = await sent(bench, whole)  # kept for another request, then closed
        assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("end", [b"X-Half: ", b"Content-Length: 9\r\n\r\n{"])
async def test_request_that_does_not_arrive_whole_is_refused(
    make_bench: MakeBench, end: bytes
) -> None:
    async with make_bench(slow_request_s=0.3) as bench:
        answer = await sent(bench, SLOW_HEAD + end)
        assert answer.startswith(b"HTTP/1.1 408") and b"serve.slow_request_s" in answer
        assert bench.gateway.stats()["serve/closed_connections"] == 1
        assert await ask(bench) == 200


async def test_answer_that_takes_longer_than_the_limits_is_not_cut(
    make_bench: MakeBench,
) -> None:
    async with make_bench(slow_request_s=0.1, idle_connection_s=0.1) as bench:
        url = f"{bench.gateway.url}/v1/chat/completions"
        headers = {"Authorization": "Bearer right-key"}
        long = ASK | {"max_tokens": 300, "ignore_eos": True}
        async with bench.http.post(url, json=long, headers=headers) as answer:
            assert answer.status == 200 and (await answer.json())["usage"]["completion_tokens"]


def test_connections_leave_descriptors_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "raise_limit", lambda: 1024)
    monkeypatch.setattr(descriptors, "number_open", lambda: 96)
    assert number_that_fits(4096) == (1024 - 96 - descriptors.RESERVED) // 2
    assert number_that_fits(10) == 10
    monkeypatch.setattr(descriptors, "number_open", lambda: 1000)
    assert number_that_fits(4096) == 1


async def test_lack_of_descriptors_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    others: list[dict] = []
    loop.set_exception_handler(lambda _, context: others.append(context))
    exhaustion = ExhaustionLog(loop)
    error = OSError(errno.EMFILE, "Too many open files")
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            loop.call_exception_handler({"message": "accept", "exception": error})
        loop.call_exception_handler({"message": "other", "exception": ValueError()})
    assert [getattr(record, "event", None) for record in caplog.records] == ["no_descriptors"]
    assert exhaustion.num_failed == 1000
    assert [context["message"] for context in others] == ["other"]
    exhaustion.close()
    loop.call_exception_handler({"message": "accept", "exception": error})
    assert len(others) == 2


@pytest.mark.parametrize("name", ["max_connections", "idle_connection_s", "slow_request_s"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, [f"serve.{name}=0"])
    assert f"serve.{name}" in str(caught.value)
