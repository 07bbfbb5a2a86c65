"""Tests of streams that wait: their first events, and those that keep them alive."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import aiohttp
import openai
import pytest
from gateway_bench import Bench, Connect

from lightning_jax.engine.generation import EngineError, Generation
from lightning_jax.gateway.answer import AnswerBuilder
from lightning_jax.gateway.dialects.openai_chat import ChatReply
from lightning_jax.gateway.http import handler

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi."}]}
GREEDY: dict[str, Any] = {"model": "policy", "stream": True, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": GREEDY | ASK | {"max_tokens": 6},
    "/v1/completions": GREEDY | {"prompt": "Hi.", "max_tokens": 6},
    "/v1/responses": GREEDY | {"input": "Hi.", "max_output_tokens": 6},
    "/v1/messages": GREEDY | ASK | {"max_tokens": 6},
    "/api/chat": GREEDY | ASK | {"options": {"num_predict": 6, "temperature": 0}},
    "/api/generate": GREEDY | {"prompt": "Hi.", "options": {"num_predict": 6, "temperature": 0}},
    "/v1beta/models/policy:streamGenerateContent?alt=sse": {
        "contents": [{"role": "user", "parts": [{"text": "Hi."}]}],
        "generationConfig": {"maxOutputTokens": 6, "temperature": 0},
    },
}
Fail = Callable[[asyncio.Event], None]
OPENINGS = {
    "/v1/chat/completions": ["role"],
    "/v1/responses": ["response.created", "response.in_progress"],
    "/v1/messages": ["message_start"],
}
SIGNS = {  # of life, by path
    "/v1/chat/completions": "nothing",
    "/v1/completions": "nothing",
    "/v1/responses": "response.in_progress",
    "/v1/messages": "ping",
    "/api/chat": "nothing",
    "/api/generate": "nothing",
    "/v1beta/models/policy:streamGenerateContent?alt=sse": "nothing",
}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that the engine's tokens wait for."""
    event, following = asyncio.Event(), Generation.__anext__

    async def wait(self: Generation) -> Any:
        await event.wait()
        return await following(self)

    monkeypatch.setattr(Generation, "__anext__", wait)
    return event


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Return a function that opens the gate of an engine that fails at the first token."""

    def break_down(gate: asyncio.Event) -> None:
        error = EngineError("the device is lost")
        monkeypatch.setattr(AnswerBuilder, "add", Mock(side_effect=error))
        gate.set()

    return break_down


@asynccontextmanager
async def _events(bench: Bench, path: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Yield the events of a stream as they come."""
    headers = {"Authorization": "Bearer right-key"}
    url = bench.gateway.url + path
    async with bench.http.post(url, json=BODIES[path], headers=headers) as response:
        assert response.status == 200
        yield _parsed(response)


async def _parsed(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.decode().strip().removeprefix("data: ")
        if data.startswith("{"):
            yield json.loads(data)


def _kind(event: dict[str, Any]) -> str:
    """Return a name for an event: its type, or what a chunk has in it."""
    if "type" in event or event.get("done") or event.get("usage"):
        return event.get("type", "end")
    (choice,) = event.get("choices", [event])
    if choice.get("finish_reason"):
        return "end"
    if "role" in choice.get("delta", {}):
        return "role"
    return "text" if _text([event]) else "nothing"


def _text(events: Iterable[dict[str, Any]]) -> str:
    """Return the text of a stream in any dialect."""
    text = ""
    for event in events:
        if event.get("type", "").endswith(".done"):  # repeats the text
            continue
        (choice, *_) = event.get("choices") or event.get("candidates") or [event]
        delta = choice.get("delta", choice)
        if isinstance(delta, str):
            text += delta
            continue
        places = (delta.get("content"), delta.get("text"), delta.get("response"))
        text += "".join(place for place in places if isinstance(place, str))
        text += (event.get("message") or {}).get("content") or "" if "done" in event else ""
        if "candidates" in event:
            text += "".join(part.get("text", "") for part in choice["content"]["parts"])
    return text


@pytest.mark.parametrize("path", SIGNS)
async def test_a_stream_speaks_while_it_waits(
    bench: Bench, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with _events(bench, path) as events:
        for kind in OPENINGS.get(path, ()):
            async with asyncio.timeout(5):  # half of the time until the first sign of life
                assert _kind(await anext(events)) == kind
        gate.set()
        prompt = [event async for event in events]
    gate.clear()
    monkeypatch.setattr(handler, "KEEP_ALIVE_S", 0.05)
    async with _events(bench, path) as events:
        opening = OPENINGS.get(path, [])
        begun = [await anext(events) for _ in range(len(opening) + 2)]
        assert [_kind(event) for event in begun] == [*opening, SIGNS[path], SIGNS[path]]
        gate.set()
        rest = [event async for event in events]
    assert _text(begun + rest) == _text(prompt) != ""
    if path == "/v1/responses":
        numbers = [event["sequence_number"] for event in begun + rest]
        assert numbers == list(range(len(numbers)))
        assert rest[-1]["response"]["output"][0]["content"][0]["text"] == _text(prompt)


async def test_geminis_signs_of_life_have_a_part(
    bench: Bench, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, Google's own clients drop the whole answer from a chat's history."""
    monkeypatch.setattr(handler, "KEEP_ALIVE_S", 0.01)
    path = next(path for path in BODIES if "v1beta" in path)
    async with _events(bench, path) as events:
        (candidate,) = (await anext(events))["candidates"]
        gate.set()
    assert candidate["content"] == {"parts": [{"text": ""}], "role": "model"}
    assert "finishReason" not in candidate


async def test_tokens_that_show_nothing_are_a_silence(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = Generation.__anext__

    async def slow(self: Generation) -> Any:
        await asyncio.sleep(0.1)
        return await following(self)

    monkeypatch.setattr(Generation, "__anext__", slow)
    monkeypatch.setattr(handler, "KEEP_ALIVE_S", 0.15)
    monkeypatch.setattr(ChatReply, "delta", lambda self, delta: ())
    async with _events(bench, "/v1/chat/completions") as events:
        kinds = [_kind(event) async for event in events]
    assert kinds[0] == "role" and kinds[-1] == "end" and "nothing" in kinds


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_the_opening_ends_the_stream(
    bench: Bench, gate: asyncio.Event, fail: Fail, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(handler, "KEEP_ALIVE_S", 0.05)
    async with _events(bench, path) as events:
        begun = [] if "v1beta" in path else [await anext(events)]
        fail(gate)
        last = [*begun, *[event async for event in events]][-1]
    assert last["error"]


async def test_openais_client_reads_past_signs_of_life(
    bench: Bench, connect: Connect, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "KEEP_ALIVE_S", 0.02)
    client = connect(bench.rollout())
    fields: dict[str, Any] = {"model": "policy", "temperature": 0}

    async def chat() -> str:
        stream: Any = await client.chat.completions.create(
            **fields, **ASK, max_tokens=6, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def response() -> str:
        create = client.responses.stream(**fields, input="Hi.", max_output_tokens=16)
        async with create as stream:
            events = [event async for event in stream]
        return "".join(e.delta for e in events if e.type == "response.output_text.delta")

    reading = asyncio.gather(chat(), response())
    await asyncio.sleep(0.2)
    gate.set()
    chatted, responded = await reading
    whole = await client.chat.completions.create(**fields, **ASK, max_tokens=6)
    other = await client.responses.create(**fields, input="Hi.", max_output_tokens=16)
    assert chatted == whole.choices[0].message.content and responded == other.output_text


@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
async def test_openais_client_raises_an_error_after_the_opening(
    bench: Bench,
    connect: Connect,
    gate: asyncio.Event,
    fail: Fail,
    monkeypatch: pytest.MonkeyPatch,
    api: str,
) -> None:
    monkeypatch.setattr(handler, "KEEP_ALIVE_S", 0.02)
    client: Any = connect(bench.rollout())
    fields: dict[str, Any] = {"model": "policy", "stream": True}
    if api == "chat":
        stream = await client.chat.completions.create(**fields, **ASK)
    elif api == "completions":
        stream = await client.completions.create(**fields, prompt="Hi.")
    else:
        stream = await client.responses.create(**fields, input="Hi.")
    await anext(aiter(stream))
    fail(gate)
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "engine_error"
