"""Tests that every failure has OpenAI's error body and the right status, and is counted."""

import asyncio
import contextlib
import json
import logging
import sqlite3
from typing import Any
from unittest.mock import Mock

import aiohttp
import openai
import pytest
from gateway_bench import BODY, Bench, Connect, MakeBench
from log_events import records
from waiting import until

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.answer import AnswerBuilder
from lightning_jax.gateway.app import Gateway, GatewayError
from lightning_jax.gateway.http.handler import EventStream
from lightning_jax.gateway.http.server import check_exposure
from lightning_jax.gateway.sessions.feedback import Reports
from lightning_jax.traces import attributes
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.types import Rollout

LONG: dict[str, Any] = BODY | {"max_tokens": 480, "seed": 1}


@pytest.mark.parametrize(
    ("body", "status", "code", "param", "names"),
    [
        (b"{", 400, "invalid_value", None, ()),
        (b"\xff\xfe", 400, "invalid_value", None, ()),
        (b"[" * 100_000, 400, "invalid_value", None, ()),
        (b'{"model": "\\ud800"}', 400, "invalid_value", None, ()),
        (b'{"stop": "\xed\xa0\x80"}', 400, "invalid_value", None, ()),
        ('{"model": "policy"}'.encode("utf-16"), 400, "invalid_value", None, ()),
        (b"[]", 400, "invalid_value", None, ()),
        (BODY | {"temperature": -1}, 400, "invalid_value", "temperature", ("-1.0",)),
        (
            BODY | {"messages": [{"role": "x"}]},
            400,
            "invalid_value",
            "messages",
            ("messages[0].role", "'x'"),
        ),
        (BODY | {"messages": ["hi", 3]}, 400, "invalid_value", "messages", ("messages[0]",)),
        (BODY | {"tools": [{}]}, 400, "invalid_value", "tools", ("tools[0]",)),
        (
            BODY | {"messages": [{"role": "user", "content": "x" * 600}]},
            400,
            "context_length_exceeded",
            "messages",
            ("maximum context length is 512 tokens", "619 tokens > 511", "serve.max_len"),
        ),
        (b"x" * (16 * 2**20 + 1), 413, "body_too_large", None, ("serve.max_body_mib",)),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str | int) else "",
)
async def test_a_request_that_cannot_work_is_refused(
    bench: Bench, body: Any, status: int, code: str, param: str | None, names: tuple[str, ...]
) -> None:
    for base in (bench.rollout().base_url, None):
        answered, reply, _ = await bench.post(body, base=base)
        assert answered == status
        assert (reply["error"]["code"], reply["error"]["param"]) == (code, param)
        assert all(name in reply["error"]["message"] for name in names)
        assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert bench.gateway.close_rollout("r1").unanswered == ()


async def test_the_policy_answers_for_an_unknown_model_name_of_an_agent(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_jax")
    base = bench.rollout().base_url
    for model in ("gpt-4o-mini", "gpt-4o-mini", "claude", "policy"):
        assert (await bench.post(BODY | {"model": model}, base=base))[0] == 200
    asked = [span.attributes[attributes.POLICY] for span in bench.store.spans("r1")]
    assert asked == ["gpt-4o-mini", "gpt-4o-mini", "claude", "policy"]
    assert [record.model for record in records(caplog, "model_substituted")] == ["gpt-4o-mini"]
    status, reply, _ = await bench.post(BODY | {"model": "gpt-4o-mini"})  # outside of rollouts
    assert (status, reply["error"]["code"]) == (404, "model_not_found")


async def test_strict_models_refuses_unknown_names_in_rollouts(make_bench: MakeBench) -> None:
    async with make_bench(strict_models=True) as bench:
        body = BODY | {"model": "gpt-4"}
        status, reply, _ = await bench.post(body, base=bench.rollout().base_url)
        assert (status, reply["error"]["code"]) == (404, "model_not_found")
        assert "'gpt-4'" in reply["error"]["message"] and reply["error"]["param"] == "model"


async def test_any_model_answers_for_unknown_names_outside_of_rollouts(bench: Bench) -> None:
    gateway = Gateway(bench.loop, records=False, any_model=True)
    await gateway.start()
    try:
        for model in ("claude-haiku-4", "policy"):
            status, reply, _ = await bench.post(BODY | {"model": model}, base=gateway.url)
            assert (status, reply["model"]) == (200, model)
    finally:
        await gateway.close()


async def test_a_refused_stream_has_a_status(bench: Bench, connect: Connect) -> None:
    client = connect(bench.rollout())
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x" * 600}], stream=True
        )
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    assert "511" in str(caught.value)
    (span,) = bench.store.spans("r1")
    assert spans_to_transitions([span]) == ((), {"context_length_exceeded": 1})


@pytest.mark.parametrize("key", ["", "wrong", "right-keyx", "rïght"])
async def test_a_wrong_key_is_refused(bench: Bench, key: str) -> None:
    status, reply, _ = await bench.post(BODY, key=key)
    assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
    async with bench.http.get(f"{bench.gateway.url}/v1/models") as response:
        assert response.status == 401


async def test_a_random_key_where_none_is_set(make_bench: MakeBench) -> None:
    async with make_bench(api_key=None) as bench:
        assert (await bench.post(BODY, key=""))[0] == 401
        assert (await bench.post(BODY, key="None"))[0] == 401
        assert (await bench.post(BODY, key=bench.gateway.api_key))[0] == 200
        assert len(bench.gateway.api_key) >= 32


async def test_a_rollout_that_is_not_running_is_not_found(bench: Bench) -> None:
    status, reply, _ = await bench.post(BODY, base=f"{bench.gateway.url}/rollout/nobody")
    assert (status, reply["error"]["code"]) == (404, "rollout_not_found")
    assert "'nobody'" in reply["error"]["message"]
    bench.store.add_rollout(Rollout("r1", "t", "g", "train", 0, 0, 1, "queued"))
    bench.store.set_status("r1", "running")
    base = bench.rollout().base_url
    guessed = base.replace("~", "~0")
    status, reply, _ = await bench.post(BODY, base=guessed)
    assert (status, reply["error"]["code"]) == (404, "rollout_not_found")
    bench.gateway.close_rollout("r1")
    # Only its own agent learns that it has ended.
    for where, is_its_own in ((base, True), (guessed, False)):
        status, reply, _ = await bench.post(BODY, base=where)
        assert (status, reply["error"]["code"]) == (404, "rollout_not_found")
        assert "'r1'" in reply["error"]["message"]
        assert ("has ended" in reply["error"]["message"]) == is_its_own


@pytest.mark.parametrize(("method", "status"), [("GET", 405), ("POST", 404)])
async def test_unknown_urls_have_error_bodies(bench: Bench, method: str, status: int) -> None:
    path = "/v1/chat/completions" if method == "GET" else "/v1/embeddings"
    async with bench.http.request(method, bench.gateway.url + path) as response:
        reply = await response.json()
    code = "http_error" if method == "GET" else "unknown_url"
    assert (response.status, reply["error"]["code"]) == (status, code)
    assert path in reply["error"]["message"]


async def test_a_websocket_is_refused_with_426(bench: Bench) -> None:
    """Codex asks for one first, and asks seven times at a 405."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    for base in (bench.gateway.url + "/v1", bench.rollout().base_url):
        async with bench.http.get(f"{base}/responses", headers=upgrade) as response:
            assert response.status == 426 and response.headers["Upgrade"] == "HTTP/1.1"
            assert (await response.json())["error"]["code"] == "upgrade_required"
    async with bench.http.get(f"{bench.gateway.url}/v1/nothing", headers=upgrade) as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/completions", "/v1/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/messages", "/v1/messages"),
        ("/v1/api/chat", "/api/chat"),
        ("/v1/embeddings", None),
        ("/v1", None),
    ],
)
async def test_a_wrong_base_url_is_answered_with_the_right_path(
    bench: Bench, path: str, meant: str | None
) -> None:
    rollout = bench.rollout()
    root = rollout.base_url.removeprefix(bench.gateway.url).removesuffix("/v1")
    for prefix in ("", root):
        async with bench.http.post(f"{bench.gateway.url}{prefix}{path}", json={}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "unknown_url")
        found = f"did you mean {prefix}{meant}?" in error["message"]
        assert found if meant else "did you mean" not in error["message"]


async def test_a_url_of_nothing_says_where_the_api_is(bench: Bench) -> None:
    async with bench.http.post(f"{bench.gateway.url}/embeddings", json={}) as response:
        assert "/v1" in (await response.json())["error"]["message"]


async def test_a_full_queue_asks_to_come_back(make_bench: MakeBench) -> None:
    async with make_bench(max_queue=0) as bench:
        base = bench.rollout().base_url
        first = asyncio.create_task(bench.post(LONG | {"n": 2}, base=base))
        await until(lambda: bench.loop.stats()["serve/running"] == 2)
        # Three more choices on four slots: all are refused, and their slots are free again.
        status, reply, headers = await bench.post(LONG | {"n": 3}, base=base)
        assert (status, reply["error"]["code"]) == (429, "queue_full")
        assert reply["error"]["type"] == "rate_limit_error" and headers["Retry-After"] == "1"
        await until(lambda: bench.loop.stats()["serve/cancelled"] == 2)
        await until(lambda: bench.loop.stats()["serve/queue_depth"] == 0)
        assert (await bench.post(BODY, base=base))[0] == 200
        assert (await first)[0] == 200
        assert bench.gateway.close_rollout("r1").unanswered == ()
        transitions, reasons = spans_to_transitions(bench.store.spans("r1"))
        assert len(transitions) == 3 and reasons == {"queue_full": 1}


async def test_a_dead_engine_is_infrastructure(bench: Bench) -> None:
    base = bench.rollout().base_url
    bench.loop.close()
    status, reply, _ = await bench.post(BODY, base=base)
    assert (status, reply["error"]["code"]) == (500, "engine_error")
    assert bench.gateway.close_rollout("r1").unanswered == ("engine_error",)


async def test_an_engine_that_dies_midway_ends_stream_and_call(
    bench: Bench, connect: Connect
) -> None:
    llm = bench.rollout()
    client, base = connect(llm), llm.base_url
    stream = await client.chat.completions.create(**LONG, stream=True)
    whole = asyncio.create_task(bench.post(LONG, base=base))
    await anext(stream)
    await until(lambda: bench.loop.stats()["serve/running"] == 2)
    bench.loop.close()
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "engine_error"
    assert (await whole)[0] == 500
    assert bench.gateway.close_rollout("r1").unanswered == ("engine_error",) * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_of_ours_ends_the_answer_and_is_infrastructure(
    bench: Bench, connect: Connect, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(AnswerBuilder, "answer", Mock(side_effect=KeyError("a bug")))
    client = connect(bench.rollout())
    with pytest.raises(openai.APIError) as caught:
        answer: Any = await client.chat.completions.create(**BODY, stream=stream)
        async for _ in answer:
            pass
    assert caught.value.code == "internal_error"
    assert "KeyError" in str(caught.value) and "a bug" not in str(caught.value)
    assert bench.gateway.close_rollout("r1").unanswered == ("internal_error",)


async def test_the_log_of_a_bug_keeps_the_rollouts_token(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = bench.rollout().base_url
    monkeypatch.setattr(Reports, "reward", Mock(side_effect=KeyError("a bug")))
    assert (await bench.post({"reward": 1}, base=base, path="/reward"))[0] == 500
    (record,) = (r for r in caplog.records if getattr(r, "event", None) == "request_failed")
    assert record.exc_info and vars(record)["path"] == "/rollout/r1/reward"
    assert "/rollout/r1/reward" in record.getMessage()
    assert base.rpartition("~")[2].partition("/")[0] not in caplog.text


async def test_a_body_that_cannot_be_unpacked_is_refused(bench: Bench) -> None:
    status, reply, _ = await bench.post(b"no gzip", **{"Content-Encoding": "gzip"})
    assert (status, reply["error"]["code"]) == (400, "invalid_value")
    assert "gzip" in reply["error"]["message"]


async def test_arguments_that_nest_too_deep_are_taken_as_text(bench: Bench) -> None:
    for depth in (200, 100_000):
        arguments = '{"a":' * depth + "1" + "}" * depth
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        call_message = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c", "content": "x"}
        messages = [*BODY["messages"], call_message, result]
        status, reply, _ = await bench.post(BODY | {"messages": messages})
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


async def test_an_agents_name_may_come_as_latin_1(bench: Bench) -> None:
    head = f"POST {bench.rollout().base_url.partition('//')[2].partition('/')[2]}/chat/completions"
    port = int(bench.gateway.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY).encode()
    lines = (head.replace("POST ", "POST /") + " HTTP/1.1", "Host: x", "Connection: close")
    lines += ("Authorization: Bearer right-key", "x-agent-name: Pr\u00fcfer")
    writer.write("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode("latin-1"))
    writer.write(body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()
    (span,) = bench.store.spans("r1")
    assert span.attributes["lightning.agent"] == "Pr\u00fcfer"


async def test_a_draining_engine_takes_no_more(bench: Bench) -> None:
    await bench.loop.drain()
    status, reply, headers = await bench.post(BODY)
    assert (status, reply["error"]["code"]) == (503, "draining")
    assert headers["Retry-After"] == "5"


async def test_a_call_that_cannot_be_recorded_gets_no_answer(bench: Bench) -> None:
    base = bench.rollout().base_url
    bench.store.close()
    status, reply, _ = await bench.post(BODY, base=base)
    assert (status, reply["error"]["code"]) == (500, "store_error")
    assert str(bench.store.path) in reply["error"]["message"]
    assert bench.gateway.close_rollout("r1").unanswered == ("store_error",)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_locked_store_holds_back_answers_and_nothing_else(
    bench: Bench, stream: bool
) -> None:
    base = bench.rollout().base_url
    ended = bench.rollout("r2").base_url
    bench.gateway.close_rollout("r2")
    with contextlib.closing(sqlite3.connect(bench.store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        url, auth = f"{base}/chat/completions", {"Authorization": "Bearer right-key"}
        call = asyncio.create_task(_read(bench, url, BODY | {"stream": stream}, auth))
        for _ in range(20):  # calls that need no write are still answered
            assert (await bench.post(BODY | {"temperature": -1}, base=base))[0] == 400
            assert (await bench.post(BODY, base=ended))[0] == 404
            await asyncio.sleep(0.02)
        assert not call.done()
        other.execute("ROLLBACK")
    assert b"length" in await call
    assert len(bench.store.spans("r1")) == 1


async def _read(bench: Bench, url: str, body: Any, headers: dict[str, str]) -> bytes:
    async with bench.http.post(url, json=body, headers=headers) as response:
        return await response.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_its_slot(bench: Bench, stream: bool) -> None:
    llm = bench.rollout()
    url = f"{llm.base_url}/chat/completions"
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    request = bench.http.post(url, json=LONG | {"stream": stream}, headers=headers)
    task = asyncio.ensure_future(request)
    await until(lambda: bench.loop.stats()["serve/running"] == 1)
    if stream:
        (await task).close()
    else:
        task.cancel()
    await until(lambda: bool(bench.store.spans("r1")))
    await until(lambda: bench.loop.stats()["serve/running"] == 0)
    assert bench.loop.stats()["serve/cancelled"] == 1
    assert spans_to_transitions(bench.store.spans("r1")) == ((), {"call_cancelled": 1})
    traffic = bench.gateway.close_rollout("r1")
    assert (traffic.num_cancelled, traffic.unanswered) == (1, ())


async def test_a_client_that_closes_its_stream_is_not_our_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def closing(self: EventStream) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(EventStream, "flush", closing)
    llm = bench.rollout()
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    url = f"{llm.base_url}/chat/completions"
    async with bench.http.post(url, json=LONG | {"stream": True}, headers=headers) as response:
        assert await response.text() == ""
    await until(lambda: bench.loop.stats()["serve/cancelled"] == 1)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert bench.gateway.close_rollout("r1").num_cancelled == 1


async def test_the_end_of_a_rollout_ends_its_calls(bench: Bench) -> None:
    base = bench.rollout().base_url
    call = asyncio.ensure_future(bench.post(LONG, base=base))
    await until(lambda: bench.loop.stats()["serve/running"] == 1)
    assert bench.gateway.close_rollout("r1").num_cancelled == 1
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await call
    await until(lambda: bool(bench.store.spans("r1")))
    await until(lambda: bench.loop.stats()["serve/running"] == 0)
    assert spans_to_transitions(bench.store.spans("r1")) == ((), {"call_cancelled": 1})


async def test_closing_ends_calls_outside_of_rollouts_too(bench: Bench) -> None:
    call = asyncio.ensure_future(bench.post(LONG))
    await until(lambda: bench.loop.stats()["serve/running"] == 1)
    async with asyncio.timeout(10):
        await bench.gateway.close()
    await asyncio.gather(call, return_exceptions=True)
    await bench.gateway.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "", "0", "::"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(GatewayError) as caught:
        check_exposure(ServeConfig(host=host))
    assert (caught.value.key, caught.value.reason) == ("serve.api_key", "missing")
    check_exposure(ServeConfig(host=host, api_key="mine"))
    check_exposure(ServeConfig(host="localhost"))


async def test_an_address_that_cannot_be_had_is_one_sentence(bench: Bench) -> None:
    taken = int(bench.gateway.url.rsplit(":", 1)[1])
    hosts = ("no-such-host.invalid", "198.51.100.1", "http://127.0.0.1", "a" * 70, "127.0.0.1:80")
    cases = [("127.0.0.1", taken, "serve.port"), *((host, 0, "serve.host") for host in hosts)]
    for host, port, key in cases:
        other = Gateway(
            bench.loop, bench.store, serve=ServeConfig(host=host, port=port, api_key="k")
        )
        with pytest.raises(GatewayError) as caught:
            await other.start()
        assert (caught.value.key, caught.value.reason) == (key, "address_unavailable")
        assert ("--port" in str(caught.value)) == (key == "serve.port")
        assert f"{host}:{port}" in str(caught.value) and "\n" not in str(caught.value)
        await other.close()
