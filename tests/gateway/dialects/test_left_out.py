"""Tests of what is left out of requests in every dialect: hosted tools, and pictures in results."""

import logging
from typing import Any

import pytest
from gateway_bench import Bench
from log_events import records

from lightning_jax.gateway.dialects import all as dialects
from lightning_jax.gateway.dialects.base import Sender
from lightning_jax.gateway.dialects.left_out import is_hosted, kind_of_file, sentence
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.prompt.messages import normalize_messages
from lightning_jax.gateway.request import PolicyRequest

IMAGE = sentence("image")
PNG = {"inlineData": {"mimeType": "image/png", "data": "iVBO"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
TEXT = {"type": "text", "text": "so"}


def _anthropic(*blocks: Any, **fields: Any) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": list(blocks)}]
    messages = [{"role": "user", "content": "look"}, *turns]
    return {"model": "policy", "max_tokens": 4, "messages": messages} | fields


def _responses(*parts: Any, **fields: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": list(parts)}
    items = [{"role": "user", "content": "look"}, call, result]
    return {"model": "policy", "max_output_tokens": 4, "input": items} | fields


def _gemini(*parts: Any, **fields: Any) -> dict[str, Any]:
    called = {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]}
    asked = {"role": "user", "parts": [{"text": "look"}]}
    contents = [asked, called, {"role": "user", "parts": list(parts)}]
    return {"contents": contents, "generationConfig": {"maxOutputTokens": 4}} | fields


def _chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    turns = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    turns += [{"role": "tool", "tool_call_id": "c", "content": list(parts)}]
    messages = [{"role": "user", "content": "look"}, *turns]
    return {"model": "policy", "max_tokens": 4, "messages": messages} | fields


def _ollama(role: str = "tool", **message: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": role, "content": "so", **message}]}


def _result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c", "content": list(content)}


def _answered(result: str = "ok", **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": "f", "response": {"output": result}, **fields}}


# Bodies by dialect, with the text of the last message and what is left out.
BODIES: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = [
    ("anthropic", _anthropic(_result(TEXT, BLOCK)), f"so\n{IMAGE}", ("image",)),
    ("anthropic", _anthropic(_result(TEXT), BLOCK, TEXT), f"{IMAGE}\nso", ("image",)),
    (
        "anthropic",
        _anthropic(_result({"type": "document", "source": {"type": "base64"}})),
        sentence("document"),
        ("document",),
    ),
    (
        "anthropic",
        _anthropic(_result({"type": "document", "source": {"type": "text", "data": "all"}})),
        "all",
        (),
    ),
    (
        "responses",
        _responses({"type": "input_text", "text": "so"}, {"type": "input_image", "image_url": "x"}),
        f"so{IMAGE}",
        ("image",),
    ),
    (
        "responses",
        _responses({"type": "input_file", "file_data": "x"}),
        sentence("document"),
        ("document",),
    ),
    ("gemini", _gemini(_answered(), PNG), IMAGE, ("image",)),
    ("gemini", _gemini(_answered(parts=[PNG])), f"ok\n{IMAGE}", ("image",)),
    (
        "gemini",
        _gemini(_answered(parts=[{"file_data": {"mime_type": "audio/wav", "file_uri": "u"}}])),
        f"ok\n{sentence('audio')}",
        ("audio",),
    ),
    ("chat", _chat(TEXT, {"type": "image_url", "image_url": {}}), f"so{IMAGE}", ("image",)),
    ("chat", _chat({"type": "input_audio"}), sentence("audio"), ("audio",)),
    ("ollama", _ollama(images=["aGk=", "aGk="]), f"so\n{IMAGE}\n{IMAGE}", ("image", "image")),
    ("chat", _chat(TEXT, web_search_options={}), "so", ("web_search",)),
    ("responses", _responses(tools=[{"type": "web_search_preview"}]), "", ("web_search_preview",)),
    (
        "anthropic",
        _anthropic(_result(TEXT), tools=[{"type": "web_search_20250305", "name": "web_search"}]),
        "so",
        ("web_search_20250305",),
    ),
    (
        "gemini",
        _gemini(_answered(), tools=[{"googleSearch": {}}, {"url_context": {}}]),
        "ok",
        ("google_search", "url_context"),
    ),
]


def _parse(dialect: str, body: dict[str, Any]) -> PolicyRequest:
    path = {"model": "policy", "method": "generateContent"}
    sender = Sender({}, path, {}, "tiny", SavedConversations())
    parse = next(d.parse for d in dialects.DIALECTS if d.name == dialect)
    return parse(body, sender).request


@pytest.mark.parametrize(("dialect", "body", "text", "left_out"), BODIES)
def test_parts_are_left_out_in_every_dialect(
    dialect: str, body: dict[str, Any], text: str, left_out: tuple[str, ...]
) -> None:
    request = _parse(dialect, body)
    assert request.messages is not None
    assert normalize_messages(request.messages)[-1]["content"] == text
    assert request.left_out == left_out and request.functions == ()


@pytest.mark.parametrize(
    ("dialect", "body", "key", "reason"),
    [
        ("anthropic", _anthropic(BLOCK), "messages[2].content[0].type", "unknown"),
        ("gemini", _gemini(PNG), "contents[2].parts[0]", "not_text"),
        ("gemini", _gemini(_answered(parts=[{}])), "contents[2].parts[0]", "missing"),
        ("ollama", _ollama("user", images=["x"]), "messages[0].images", "unsupported"),
    ],
)
def test_pictures_of_the_user_are_refused(
    dialect: str, body: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(ApiError) as caught:
        _parse(dialect, body)
    assert caught.value.reason == reason and (caught.value.key or "").startswith(key)


@pytest.mark.parametrize(
    "kind", ["bash_20250124", "text_editor_20250728", "computer_use_preview", "local_shell", "", 1]
)
def test_tools_of_the_client_are_not_hosted(kind: Any) -> None:
    assert not is_hosted(kind) and is_hosted("web_fetch_20250910") and is_hosted("mcp")


def test_kinds_of_files() -> None:
    assert [*map(kind_of_file, ("image/png", "application/pdf", "", "audio/wav\r\nx"))] == [
        "image",
        "document",
        "document",
        "audio",
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_what_was_left_out(
    bench: Bench, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.WARNING, "lightning_jax")
    body = _anthropic(_result(BLOCK), tools=[{"type": "web_search_20250305"}], stream=stream)
    bases = [bench.rollout("r1").base_url, bench.rollout("r2").base_url, bench.gateway.url]
    for base in (*bases, *bases):
        headers = {"x-api-key": "right-key"}
        url = base.removesuffix("/v1") + "/v1/messages"
        async with bench.http.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            assert response.headers["X-Left-Out"] == "web_search_20250305, image"
    assert len(records(caplog, "left_out")) == 3  # one for each rollout, and one for the others
    assert bench.gateway.stats()["serve/calls_with_parts_left_out"] == 6
    _, _, headers = await bench.post(_chat(TEXT))
    assert "X-Left-Out" not in headers
