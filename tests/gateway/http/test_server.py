"""Tests that bodies are limited and that long ones are read outside the event loop."""

import asyncio
import gzip
import json
import threading
import zlib
from collections import Counter
from typing import Any

import pytest
from gateway_bench import Bench, MakeBench
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway import fields
from lightning_jax.gateway.calls import offload
from lightning_jax.gateway.calls.offload import INLINE_BYTES, Offload
from lightning_jax.gateway.dialects import unknown_fields
from lightning_jax.gateway.dialects.openai_chat import ChatReply
from lightning_jax.gateway.dialects.openai_completions import CompletionsReply
from lightning_jax.gateway.errors import MAX_MESSAGE, ApiError
from lightning_jax.gateway.fields import MAX_DEPTH, _without_strings, num_values
from lightning_jax.gateway.http.handler import EventStream
from lightning_jax.gateway.http.server import Bodies
from lightning_jax.gateway.prompt.call_syntax import MAX_VALUES, read_arguments
from lightning_jax.gateway.request import check_model
from lightning_jax.models.tokenizer import Tokenizer

BODY: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
}


def _bodies(**serve: Any) -> Bodies:
    return Bodies(ServeConfig(**serve), Offload())


def _num_values(value: Any) -> int:
    if isinstance(value, dict):
        return sum(1 + _num_values(inner) for inner in value.values()) + 1
    return 1 + sum(map(_num_values, value)) if isinstance(value, list) else 1


json_values = st.recursive(
    st.one_of(st.none(), st.floats(allow_nan=False), st.text('ab,:[{"\\\n\u2028é'), st.integers()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text('ab,:[{"\\'), inner)),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(value=json_values)
def test_values_are_counted_without_what_strings_hold(value: Any) -> None:
    raw = json.dumps(value).encode()
    number = _num_values(value)
    assert num_values(raw) >= number
    counted = num_values(_without_strings(raw, 10**6))
    assert number <= counted <= 2 * number  # an empty list or object counts like a non-empty one


@pytest.mark.parametrize(
    "value",
    [{str(i): 1 for i in range(600)}, [[]] * 1100, [""] * 1100, [1] * 1100],
    ids=["names", "lists", "strings", "numbers"],
)
def test_too_many_values_are_refused(value: Any) -> None:
    raw = json.dumps({"x": value}).encode()
    assert _bodies().as_json(raw)
    with pytest.raises(ApiError) as refused:
        _bodies(max_json_values=1000).as_json(raw)
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")
    assert refused.value.key == "serve.max_json_values"
    assert refused.value.key in refused.value.message


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 100_000, "malformed"),
        (b'{"model": "\\ud800"}', "malformed"),
        (b'{"stop": "\xed\xa0\x80"}', "malformed"),
        ('{"model": "policy"}'.encode("utf-16"), "malformed"),
        (b"[]", "wrong_type"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "too_deep"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_body_that_is_no_object_has_a_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(ApiError) as refused:
        _bodies().as_json(raw)
    assert (refused.value.status, refused.value.reason) == (400, reason)


@pytest.mark.parametrize("value", [[1] * MAX_VALUES, {"a": [{}] * MAX_VALUES}])
def test_arguments_of_too_many_values_are_taken_as_text(value: Any) -> None:
    text = json.dumps(value)
    assert read_arguments(text) == text
    assert read_arguments(json.dumps(["," * MAX_VALUES])) == ["," * MAX_VALUES]


def test_a_refusal_repeats_little_of_a_long_text() -> None:
    with pytest.raises(ApiError) as refused:
        check_model("x" * 10**6, ())
    assert len(refused.value.message) < 1000
    assert len(ApiError(400, "code", "x" * 10**6).message) <= MAX_MESSAGE + 3


def test_punctuation_in_text_is_no_value() -> None:
    text = 'a, b: "c" \\ [d] {e}' * 10_000
    body = {"x": text, "y": "\\", "z": '\\"'}
    assert _bodies(max_json_values=1000).as_json(json.dumps(body).encode()) == body


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_half_a_surrogate_pair_is_refused_wherever_it_is(text: str) -> None:
    for body in ({"x": [{"y": text}]}, {"x": {text: 1}}):
        with pytest.raises(ApiError) as refused:
            _bodies().as_json(json.dumps(body).encode())
        assert refused.value.status == 400
    whole = {"x": "\U0001f600 \\ud800"}
    assert _bodies().as_json(json.dumps(whole).encode()) == whole


async def test_long_work_is_done_in_a_thread() -> None:
    work = Offload()
    assert await work.run(INLINE_BYTES, threading.current_thread) is threading.current_thread()
    long = await work.run(INLINE_BYTES + 1, threading.current_thread)
    assert long is not threading.current_thread()
    work.close()


async def test_nothing_of_a_long_call_is_parsed_or_encoded_on_the_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, threading.Thread] = {}
    as_object, encode = fields.as_object, Tokenizer.encode

    def seen_as_object(body: object) -> Any:
        threads["json"] = threading.current_thread()
        return as_object(body)

    def seen_encode(self: Tokenizer, text: str, **options: Any) -> Any:
        threads["tokens"] = threading.current_thread()
        return encode(self, text, **options)

    monkeypatch.setattr("lightning_jax.gateway.http.server.as_object", seen_as_object)
    monkeypatch.setattr(Tokenizer, "encode", seen_encode)
    long = BODY | {"messages": [{"role": "user", "content": "x" * 2 * INLINE_BYTES}]}
    status, reply, _ = await bench.post(long)
    # Too long for serve.max_len tokens of any length, so it is not encoded at all.
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert "tokens" not in threads
    assert threads["json"].name.startswith("gateway")
    shorter = BODY | {"messages": [{"role": "user", "content": "x" * 2000}], "x": "y" * 20_000}
    status, reply, _ = await bench.post(shorter)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert threads["tokens"].name.startswith("gateway")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_refused_long_prompt_is_on_record_without_its_ids(bench: Bench, path: str) -> None:
    base = bench.rollout().base_url
    text = "x" * 100_000
    for prompt in (text, text[:3000]):
        body = {"messages": [{"role": "user", "content": prompt}], "prompt": prompt}
        status, reply, _ = await bench.post(BODY | body, base=base, path=path)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    spans = bench.store.spans("r1")
    assert [span.attributes["error.type"] for span in spans] == ["context_length_exceeded"] * 2
    lengths = [span.attributes["gen_ai.usage.input_tokens"] for span in spans]
    assert all(length > 512 for length in lengths)  # also where the ids are not recorded
    assert [span.attributes["lightning.prompt_token_ids"] for span in spans] == [()] * 2


async def test_unpacked_bodies_are_read(bench: Bench) -> None:
    raw = json.dumps(BODY).encode()
    for packed, coding in (
        (gzip.compress(raw, mtime=0), "gzip"),
        (zlib.compress(raw), "deflate"),
        (zlib.compress(raw)[2:-4], "deflate"),
        (raw, "identity"),
    ):
        status, reply, _ = await bench.post(packed, **{"Content-Encoding": coding})
        assert status == 200, reply


@pytest.mark.parametrize(
    ("packed", "coding", "status", "code"),
    [
        (b"no gzip", "gzip", 400, "invalid_value"),
        (gzip.compress(b"{}" * 99, mtime=0)[:-12], "gzip", 400, "invalid_value"),
        (gzip.compress(b"{}", mtime=0) * 2, "gzip", 400, "invalid_value"),
        (zlib.compress(b"x" * 3 * 2**20), "deflate", 413, "body_too_large"),
        (b"{}", "br", 415, "unsupported_encoding"),
        (b"{}", "gzip, gzip", 415, "unsupported_encoding"),
    ],
)
async def test_a_body_that_cannot_be_unpacked_is_refused_and_the_connection_stays(
    make_bench: MakeBench,
    packed: bytes,
    coding: str,
    status: int,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with make_bench(max_body_mib=1.0) as bench:
        for path in ("/v1/chat/completions", "/v1/traces"):
            headers = {"Content-Encoding": coding}
            answered, reply, reply_headers = await bench.post(packed, path=path, **headers)
            assert (answered, reply["error"]["code"]) == (status, code)
            assert reply_headers.get("Connection") != "close"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_unknown_fields_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    body = {f"odd_{i}": 1 for i in range(100_000)}
    for _ in range(3):
        unknown_fields.check_unknown("test_http", body, {"known"})
    (record,) = caplog.records
    assert vars(record)["event"] == "unknown_fields"
    assert vars(record)["fields"] == [f"odd_{i}" for i in range(unknown_fields.MAX_NAMED)]
    assert vars(record)["num_more"] == 100_000 - unknown_fields.MAX_NAMED
    assert "odd_0" in record.getMessage() and "\n" not in record.getMessage()
    for i in range(1000):
        unknown_fields.check_unknown("test_http", {f"other_{i}": 1}, ())
    assert len(caplog.records) <= unknown_fields.MAX_WARNINGS


async def test_closed_offload_takes_no_more_work() -> None:
    work = offload.Offload()
    work.close()
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(work.run(INLINE_BYTES + 1, int), 10)


@settings(deadline=None, max_examples=200)
@given(value=json_values)
def test_json_is_written_as_the_library_writes_it(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for most in (offload.STEP_VALUES, 1):
            patch.setattr(offload, "STEP_VALUES", most)
            assert offload.dump_json(value) == json.dumps(value)
            text = offload.dump_json(value, ensure_ascii=False)
            assert text == json.dumps(value, ensure_ascii=False)
            assert offload.dump_json({"a": (1, value)}, depth=1) == json.dumps({"a": [1, value]})


def test_json_is_written_in_steps_of_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    best = [{"token": "a", "logprob": -1.5, "bytes": [97]}] * 20
    entries = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": best}] * 30
    part = {"type": "output_text", "text": "a" * 30, "logprobs": entries}
    item = {"type": "message", "content": [part]}
    event = {"response": {"output": [item], "metadata": dict.fromkeys(map(str, range(2000)), "x")}}
    dumps, lengths = json.dumps, []

    def dump(value: Any, **settings: Any) -> str:
        lengths.append(len(text := dumps(value, **settings)))
        return text

    monkeypatch.setattr(offload.json, "dumps", dump)
    assert offload.dump_json(event) == dumps(event)
    assert max(lengths) == len(dumps(entries[0]))


MANY = {"n": 8, "max_tokens": 40, "logprobs": True, "top_logprobs": 20}
ECHO = {"model": "policy", "prompt": "ab " * 20, "max_tokens": 1, "echo": True, "logprobs": 20}


@pytest.mark.parametrize(
    ("kind", "body", "is_in_thread"),
    [(ChatReply, BODY, False), (ChatReply, BODY | MANY, True), (CompletionsReply, ECHO, True)],
)
async def test_a_long_answer_is_written_in_a_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: Any, body: Any, is_in_thread: bool
) -> None:
    threads, whole = list[str](), kind.body

    def note(self: Any, answers: Any) -> Any:
        threads.append(threading.current_thread().name)
        return whole(self, answers)

    monkeypatch.setattr(kind, "body", note)
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    status, reply, _ = await bench.post(body, path=path)
    assert status == 200 and reply["choices"][0]
    assert [name.startswith("gateway") for name in threads] == [is_in_thread]


async def test_long_parts_of_a_stream_are_written_in_a_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    hold = EventStream.hold

    def noting(self: EventStream, *arguments: Any) -> None:
        threads.append(threading.current_thread().name.startswith("gateway"))
        hold(self, *arguments)

    monkeypatch.setattr(EventStream, "hold", noting)
    short = {"model": "policy", "input": "hi", "stream": True, "max_output_tokens": 2}
    alternatives = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    begins_long = {"metadata": {"k": "x" * INLINE_BYTES}}
    ends_long = alternatives | {"max_output_tokens": 40, "ignore_eos": True}
    found = []
    for more in ({}, begins_long, ends_long):
        headers = {"Authorization": "Bearer right-key"}
        url = f"{bench.gateway.url}/v1/responses"
        async with bench.http.post(url, json=short | more, headers=headers) as response:
            text = await response.text()
            assert response.status == 200
            assert "response.incomplete" in text or "response.completed" in text
        found.append((threads[0], any(threads[1:-1]), threads[-1]))
        threads.clear()
    assert found == [(False, False, False), (True, False, True), (False, False, True)]


async def test_a_stream_lets_others_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry joins an ended call, so all of its events are due at once."""
    headers = {"Authorization": "Bearer right-key", "Idempotency-Key": "1"}
    llm = bench.rollout()
    headers["Authorization"] = f"Bearer {llm.api_key}"
    url = f"{llm.base_url}/chat/completions"
    body = BODY | {"n": 8, "max_tokens": 30, "logprobs": True, "top_logprobs": 20, "stream": True}
    turns = 0
    sent: list[int] = []  # turn of each event
    send = EventStream.send

    async def noting(self: EventStream, events: Any) -> None:
        sent.append(turns)
        await send(self, events)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with bench.http.post(url, json=body, headers=headers) as response:
        first = await response.text()
    monkeypatch.setattr(EventStream, "send", noting)
    counting = asyncio.create_task(count())
    async with bench.http.post(url, json=body, headers=headers) as response:
        assert await response.text() == first
    counting.cancel()
    most = max(Counter(sent).values())
    assert len(sent) >= 8 * 20 and most * len(first) / len(sent) < 2 * INLINE_BYTES


async def test_a_posted_reward_reads_no_span(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    base = bench.rollout().base_url
    ids = [(await bench.post(BODY, base=base))[1]["id"] for _ in range(3)]
    monkeypatch.setattr(type(bench.store), "spans", None)
    for call, known in (("last", ids[-1]), (ids[0], ids[0])):
        status, reply, _ = await bench.post({"reward": 1, "call": call}, base=base, path="/reward")
        assert (status, reply["call"]) == (200, known)
    status, reply, _ = await bench.post({"reward": 1, "call": "x"}, base=base, path="/reward")
    assert (status, reply["error"]["code"]) == (404, "call_not_found")
