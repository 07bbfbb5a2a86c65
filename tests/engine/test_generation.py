"""Tests that a response is the same whoever listened to it, and from when on."""

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tokenizers
from engine_bench import Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from lightning_jax.engine import generation as generation_module
from lightning_jax.engine.generation import EngineError, Generation, news_of
from lightning_jax.engine.response import Chunk, Response, StopStrings, pack_records, rest_of
from lightning_jax.engine.types import Completion, SamplingParams, TopLogprobs
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer
from lightning_jax.testing.tiny import tiny_tokenizer


def byte_fallback() -> Tokenizer:
    """Return a vocabulary like Llama 2's, which decodes a run of byte tokens as a whole."""
    words = ["<unk>", "</s>", "▁", "▁a", "b", "END"]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend, eos_ids=[1])


def metaspace() -> Tokenizer:
    """Return a vocabulary that drops the blank before the first word."""
    vocab = {"▁a": 0, "▁b": 1, "c": 2, "END": 3, "▁": 4, "</s>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], fuse_unk=False))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, eos_ids=[5])


VOCABULARIES = {"bytes": tiny_tokenizer(), "fallback": byte_fallback(), "metaspace": metaspace()}
EOS_IDS = {name: sorted(tokenizer.eos_ids) for name, tokenizer in VOCABULARIES.items()}
# Bytes of whole and of broken characters, and letters of the stop strings.
COMMON = [*"aEND é€🙂".encode(), 0x80, 0xE2, 0xF0, 0x9F]


@dataclass(frozen=True)
class Sample:
    """Tokens of a response with all that belongs to them, and what was asked for."""

    tokenizer: Tokenizer
    options: dict[str, Any]
    limit: int
    context: tuple[int, ...]
    ids: list[int]
    logprobs: np.ndarray  # [3, N]
    versions: list[int]
    forced: list[bool]
    top: list[TopLogprobs]

    @functools.cached_property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**self.options)

    def response(self) -> Response:
        decoder = StreamDecoder(self.tokenizer, self.sampling.shown_ids, self.context)
        return Response(decoder, self.tokenizer.eos_ids, self.sampling, self.limit)

    def is_end(self, index: int) -> bool:
        is_eos = self.ids[index] in self.tokenizer.eos_ids and not self.sampling.ignore_eos
        return is_eos or index + 1 == self.limit


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    name = draw(st.sampled_from(sorted(VOCABULARIES)))
    tokenizer = VOCABULARIES[name]
    ids = st.integers(0, tokenizer.vocab_size - 1)
    if name != "metaspace":
        offset = 6 if name == "fallback" else 0
        ids |= st.sampled_from([offset + byte for byte in COMMON])
    tokens = draw(st.lists(ids, min_size=1, max_size=24))
    number = len(tokens)
    floats = st.floats(-30, 0, width=32)
    num_top = draw(st.integers(0, 2))
    options = {
        "stop": draw(st.sampled_from([(), (), ("END",), ("ND", "a "), ("é",), ("\ufffd",)])),
        "ignore_eos": draw(st.booleans()),
        "top_logprobs": num_top,
        "shown_ids": tuple(draw(st.sets(st.sampled_from(EOS_IDS[name])))),
    }
    pairs = st.lists(st.tuples(ids, floats), min_size=num_top, max_size=num_top).map(tuple)
    columns = st.lists(floats, min_size=number, max_size=number)
    return Sample(
        tokenizer,
        options,
        limit=draw(st.integers(1, number + 3)),
        context=tuple(draw(st.lists(ids, max_size=1))),
        ids=tokens,
        logprobs=np.array([draw(columns) for _ in range(3)], np.float32),
        versions=sorted(draw(st.lists(st.integers(0, 9), min_size=number, max_size=number))),
        forced=draw(st.lists(st.booleans(), min_size=number, max_size=number)),
        top=draw(st.lists(pairs, min_size=number, max_size=number)),
    )


def one_by_one(sample: Sample) -> tuple[str, int, str]:
    """Return text, number of tokens and finish reason, decoded token by token."""
    decoder = StreamDecoder(sample.tokenizer, sample.sampling.shown_ids, sample.context)
    stops, text = StopStrings(sample.sampling.stop), ""
    for index, token_id in enumerate(sample.ids):
        is_eos = token_id in sample.tokenizer.eos_ids and not sample.sampling.ignore_eos
        is_end = sample.is_end(index)
        piece = ("" if is_eos else decoder.push(token_id)) + (decoder.flush() if is_end else "")
        visible, stop = stops.push(piece, final=is_end)
        text += visible
        if stop or is_end:
            return text, index + 1, "stop" if stop or is_eos else "length"
    return text, len(sample.ids), "cancelled"


async def serve(sample: Sample, follow_at: int | None) -> tuple[list[Chunk], Completion]:
    """Return chunks and completion of what an engine does, with a listener from a token on."""
    response, generation = sample.response(), Generation(lambda _: None)
    for index, token_id in enumerate(sample.ids):
        if index == follow_at:
            aiter(generation)
        bits = sample.logprobs[:, index : index + 1].view(np.int32)
        packed = np.concatenate([np.array([[token_id]], np.int32), bits])
        forced = [0] if sample.forced[index] else []
        response.append(*pack_records(packed, sample.versions[index], forced))
        if sample.sampling.top_logprobs:
            response.top_logprobs.append(sample.top[index])
        is_watched = sample.is_end(index) or sample.sampling.stop
        if is_watched and (reason := response.end()):
            generation.receive(None, response.completion(reason))
            break
        if news := news_of(generation, response):
            generation.receive(news.chunk, news.outcome)
    else:
        generation.receive(None, response.completion("cancelled"))
    await generation.started()
    return [chunk async for chunk in generation], await generation.result()


def joined(chunks: Sequence[Chunk]) -> Chunk:
    fields = [[getattr(chunk, name) for chunk in chunks] for name in Chunk.__dataclass_fields__]
    return Chunk("".join(fields[0]), *(sum(field, ()) for field in fields[1:]))


@given(sample=samples(), later=st.integers(1, 24))
@settings(max_examples=150, deadline=None)
def test_response_is_the_same_from_chunks_and_at_its_end(sample: Sample, later: int) -> None:
    text, number, reason = one_by_one(sample)
    for follow_at in (0, later, None):
        chunks, completion = asyncio.run(serve(sample, follow_at))
        assert joined(chunks) == rest_of(completion)
        assert (completion.text, completion.finish_reason) == (text, reason)
        assert completion.token_ids == tuple(sample.ids[:number])
        logprobs = [tuple(row) for row in sample.logprobs[:, :number].tolist()]
        assert completion.behavior_logprobs == logprobs[0]
        assert completion.sampling_logprobs == logprobs[1]
        assert completion.tempered_logprobs == logprobs[2]
        assert completion.policy_versions == tuple(sample.versions[:number])
        assert completion.forced == tuple(sample.forced[:number])
        has_top = sample.sampling.top_logprobs > 0
        assert completion.top_logprobs == tuple(
            top if has_top else () for top in sample.top[:number]
        )
        if follow_at == 0:
            assert [len(chunk.token_ids) for chunk in chunks] == [1] * number


async def test_started_ends_with_the_first_token_or_the_failure() -> None:
    generation, failed = Generation(lambda _: None), Generation(lambda _: None)
    waiting = asyncio.create_task(generation.started())
    await asyncio.sleep(0)
    assert not waiting.done()
    generation.receive(None, None)
    await waiting
    failed.receive(None, EngineError("the device is lost", reason="failed"))
    with pytest.raises(EngineError):
        await failed.started()


@pytest.mark.parametrize("orchestrator", ["native", "jetstream"])
@pytest.mark.parametrize("stop", [(), ("\x00\x01",)])
async def test_engine_sends_chunks_only_to_listeners(
    bench: Bench,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    orchestrator: str,
    stop: tuple[str, ...],
) -> None:
    loop = bench.loop if orchestrator == "native" else request.getfixturevalue("jetstream_loop")
    received: list[tuple[Any, ...]] = []
    receive = Generation.receive

    def count(self: Generation, *arguments: Any) -> None:
        received.append(arguments)
        receive(self, *arguments)

    monkeypatch.setattr(generation_module.Generation, "receive", count)
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop=stop)
    alone = await loop.submit(bench.ids("text"), sampling).result()
    assert [outcome is not None for _, outcome in received] == [False, True]
    assert all(chunk is None for chunk, _ in received)
    received.clear()
    listener = loop.submit(bench.ids("text"), sampling)
    chunks = [chunk async for chunk in listener]
    assert joined(chunks) == rest_of(await listener.result())
    assert len(received) >= 19 and (await listener.result()).token_ids == alone.token_ids
