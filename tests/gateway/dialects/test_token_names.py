"""Tests of names and bytes in log-probabilities, and of the tokenizer's own BOS in text prompts.

The vocabulary is like Llama 2's, which drops the blank at the start of a text.
"""

import json
from typing import Any

import pytest
from coded import raises_coded
from gateway_bench import Bench, MakeBench
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion, PromptScores
from lightning_jax.gateway.answer import AnswerBuilder
from lightning_jax.gateway.dialects import ollama, openai_chat, openai_completions
from lightning_jax.gateway.dialects.base import Reply, ReplyContext, Sender
from lightning_jax.gateway.dialects.openai_responses import dialect as openai_responses
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.prompt.tool_calls import TextPiece
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer
from lightning_jax.testing.tiny import sentencepiece

SENDER = Sender({}, {}, {}, "tiny", SavedConversations())
WORDS = Tokenizer(sentencepiece(), eos_ids=[2], special_tokens={"eos_token": "</s>"})
MESSAGES = [{"role": "user", "content": "hi"}]
PARSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (openai_chat.parse, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
    "responses": (
        openai_responses.parse,
        {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "ollama": (
        ollama.parse_chat,
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "stream": False},
    ),
}


def _ids(*tokens: str) -> list[int]:
    found = [WORDS.token_id(token) for token in tokens]
    assert None not in found
    return [token_id for token_id in found if token_id is not None]


def _completion(ids: list[int], context: tuple[int, ...] = ()) -> Completion:
    decoder = StreamDecoder(WORDS, (), context)
    text = "".join(map(decoder.push, ids)) + decoder.flush()
    numbers, tops = (-1.0,) * len(ids), (((5, -0.5), (ids[0], -1.0)),) * len(ids)
    return Completion(
        tuple(ids), text, numbers, numbers, (1,) * len(ids), "stop", top_logprobs=tops
    )


def _chunk(done: Completion, index: int) -> Chunk:
    at = slice(index, index + 1)
    return Chunk("", done.token_ids[at], (-1.0,), (-1.0,), (1,), (False,), done.top_logprobs[at])


def _reply(dialect: str) -> Reply:
    parse, body = PARSED[dialect]
    reply = parse({"model": "policy", **body}, SENDER)
    return reply.begin(ReplyContext("t", 1, ((1,),), WORDS))


def _entries(value: Any) -> list[dict[str, Any]]:
    """Return the log-probability entries in a body, at any depth."""
    if isinstance(value, dict):
        if "bytes" in value:
            return [value]
        return [entry for item in value.values() for entry in _entries(item)]
    if isinstance(value, list):
        return [entry for item in value for entry in _entries(item)]
    return []


TEXTS = ["▁the", "▁red", "the", "▁", "a", "<0x0A>", "<0x20>", "<0xF0>", "<0x9F>", "<s>", "</s>"]


@pytest.mark.parametrize("dialect", PARSED)
@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=7))
def test_bytes_join_to_the_content(dialect: str, tokens: list[str]) -> None:
    ids = _ids(*tokens)
    done = _completion(ids)
    builder = AnswerBuilder(0)
    builder.add([TextPiece(done.text)], None)
    answer = builder.answer((1,), done)
    entries = _entries(json.loads(json.dumps(_reply(dialect).body([answer]))))
    assert len(entries) == len(ids)
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    if "\ufffd" not in done.text:
        assert joined.decode() == done.text
    assert [entry["token"] for entry in entries] == [WORDS.pieces.name(i) for i in ids]
    for entry in entries:
        names = [other["token"] for other in entry["top_logprobs"]]
        assert len(set(names)) == len(set((5, ids[0])))
    streamed = _reply(dialect)
    events = [
        event
        for index in range(len(ids))
        for event in streamed.delta(builder.add([TextPiece("x")], _chunk(done, index)))
    ]
    if dialect != "responses":  # its events have no bytes
        assert _entries(events) == entries


def test_names_keep_their_blanks_and_parts_of_characters_have_bytes() -> None:
    ids = _ids("▁the", "▁red", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "</s>")
    builder = AnswerBuilder(0)
    builder.add([TextPiece("the red😀")], None)
    body = _reply("chat").body([builder.answer((1,), _completion(ids))])
    entries = body["choices"][0]["logprobs"]["content"]
    shown = [(entry["token"], bytes(entry["bytes"])) for entry in entries]
    assert shown == [
        (" the", b"the"), (" red", b" red"), (r"bytes:\xf0", b"\xf0"), (r"bytes:\x9f", b"\x9f"),
        (r"bytes:\x98", b"\x98"), (r"bytes:\x80", b"\x80"), ("</s>", b""),
    ]  # fmt: skip


def _legacy(
    tokenizer: Tokenizer, prompt: Any, prompt_ids: list[int], sampled: list[int], **fields: Any
) -> Any:
    """Return the choice of an echoed prompt and a known answer."""
    body = {"model": "policy", "prompt": prompt, "echo": True, "logprobs": 2, **fields}
    reply = openai_completions.parse(body, SENDER)
    done = _completion(sampled, tuple(prompt_ids[-1:]))
    tops = tuple(((5, -0.5), (i, -1.0)) for i in prompt_ids[1:])
    object.__setattr__(done, "prompt_scores", PromptScores((-1.0,) * len(tops), tops))
    builder = AnswerBuilder(0)
    builder.add([TextPiece(done.text)], None)
    reply.begin(ReplyContext("t", 1, (tuple(prompt_ids),), tokenizer))
    (choice,) = reply.body([builder.answer(tuple(prompt_ids), done)])["choices"]
    return choice


def _with_bos() -> Tokenizer:
    backend = sentencepiece()
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Tokenizer(backend, eos_ids=[2], special_tokens={"eos_token": "</s>"})


@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize("is_text", [False, True])
def test_names_of_an_echoed_prompt_join_to_the_text(has_bos: bool, is_text: bool) -> None:
    tokenizer, text = (_with_bos() if has_bos else WORDS), "the red fox"
    ids, sampled = tokenizer.encode_text(text), _ids("▁fox", "the")
    assert ids == [1] * has_bos + _ids("▁the", "▁red", "▁fox")
    choice = _legacy(tokenizer, text if is_text else ids, ids, sampled)
    found = choice["logprobs"]
    own = found["tokens"][1:] if has_bos and is_text else found["tokens"]
    expected = "<s> the red fox" if has_bos and not is_text else text
    assert choice["text"] == "".join(own) == expected + " foxthe"
    ends = [*found["text_offset"][1:], len(choice["text"])]
    pieces = [choice["text"][a:b] for a, b in zip(found["text_offset"], ends, strict=True)]
    assert pieces == ([""] if has_bos and is_text else []) + own
    for name, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert name in top and len(top) >= 2


async def test_a_text_prompt_gets_the_tokenizers_own_bos(make_bench: MakeBench) -> None:
    tokenizer = _with_bos()
    async with make_bench(tokenizer=tokenizer) as bench:
        plain = tokenizer.encode("the red")
        for fields, expected in (
            ({}, [1, *plain]),
            ({"add_special_tokens": True}, [1, *plain]),
            ({"add_special_tokens": False}, plain),
            ({"prompt": plain}, plain),
            ({"prompt": plain, "add_special_tokens": True}, plain),
        ):
            assert await _prompt_ids(bench, fields) == expected
        body = {"model": "policy", "prompt": "the red", "raw": True, "stream": False}
        status, reply, _ = await bench.post(body, path="/api/generate")
        assert (status, reply["prompt_eval_count"]) == (200, 1 + len(plain))


async def _prompt_ids(bench: Bench, fields: dict[str, Any]) -> list[int]:
    body = {"model": "policy", "prompt": "the red", "max_tokens": 1, "return_token_ids": True}
    status, reply, _ = await bench.post(body | fields, path="/v1/completions")
    assert status == 200, reply
    return reply["choices"][0]["prompt_token_ids"]


async def test_a_completion_continues_its_prompt_with_the_blank(make_bench: MakeBench) -> None:
    async with make_bench(tokenizer=WORDS) as bench:
        (fox,) = _ids("▁fox")
        body = {"model": "policy", "prompt": "the red", "max_tokens": 2, "logprobs": 0}
        body |= {"logit_bias": {str(fox): 100}, "echo": True, "temperature": 0}
        for echo, expected in (True, "the red fox fox"), (False, " fox fox"):
            status, reply, _ = await bench.post(body | {"echo": echo}, path="/v1/completions")
            (choice,) = reply["choices"]
            assert (status, choice["text"]) == (200, expected)
            assert "".join(choice["logprobs"]["tokens"]) == expected


def test_a_chat_template_writes_its_own_special_tokens() -> None:
    body = {"model": "policy", "messages": MESSAGES}
    openai_chat.parse(body | {"add_special_tokens": False}, SENDER)
    with raises_coded(ApiError, "unsupported", "add_special_tokens"):
        openai_chat.parse(body | {"add_special_tokens": True}, SENDER)
