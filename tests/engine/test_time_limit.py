"""Tests of time limits: when they begin, what they count, and how they end a response."""

import itertools

import pytest

from lightning_jax.engine.response import Response, SampledToken
from lightning_jax.engine.time_limit import TimeLimit
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.models.tokenizer import StreamDecoder
from lightning_jax.testing.tiny import tiny_tokenizer

from .conftest import Bench

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def _limit(seconds: float | None) -> TimeLimit:
    """Return a limit whose clock goes a second further at each token."""
    return TimeLimit(seconds, itertools.count(100.0).__next__)


def test_the_time_begins_with_the_first_token_and_may_stand_still() -> None:
    now_s = 50.0
    limit = TimeLimit(3.0, lambda: now_s)
    now_s = 90.0
    assert not limit.is_over()
    now_s = 92.9
    assert not limit.is_over()
    now_s = 95.0
    assert not limit.is_over(stalled_s=2.5) and limit.is_over()
    without = TimeLimit(None, lambda: now_s)
    assert not without.is_over()
    without.end()
    assert without.is_over()


@pytest.mark.parametrize(
    ("text", "stop", "limit", "reason", "is_late"),
    [
        ("abcdef", (), 9, "length", True),
        ("abcdef", (), 3, "length", False),  # the token limit falls on the same token
        ("abEND", ("END",), 9, "length", True),  # the stop string is not complete
        ("aENDbc", ("bEN", "EN"), 9, "stop", False),
    ],
)
def test_a_late_token_is_the_last_one(
    text: str, stop: tuple[str, ...], limit: int, reason: str, is_late: bool
) -> None:
    tokenizer, sampling = tiny_tokenizer(), SamplingParams(stop=stop)
    decoder = StreamDecoder(tokenizer)
    response = Response(decoder, tokenizer.eos_ids, sampling, limit, _limit(2.0))
    shown, ended = "", None
    for token_id in tokenizer.encode(text):
        chunk, ended = response.push(SampledToken(token_id, -1.0, -2.0, -1.5, 3))
        shown += chunk.text
        if ended:
            break
    assert ended is not None and ended == reason
    found = response.completion(ended)
    assert (found.is_late, len(found.token_ids), found.text) == (is_late, 3, shown)
    assert found.behavior_logprobs == (-1.0,) * 3
    assert shown == (text[:3] if reason == "length" else "a")


def test_a_standstill_of_the_engine_does_not_count() -> None:
    tokenizer = tiny_tokenizer()
    decoder, stalled = StreamDecoder(tokenizer), itertools.count(0.0, 0.5)
    response = Response(
        decoder, tokenizer.eos_ids, SamplingParams(), 99, _limit(2.0), stalled.__next__
    )
    token = SampledToken(tokenizer.encode("a")[0], -1.0, -2.0, -1.5, 3)
    assert [response.push(token)[1] for _ in range(5)] == [None] * 4 + ["length"]


def _begins_like(cut: Completion, whole: Completion) -> None:
    number = len(cut.token_ids)
    assert cut.token_ids == whole.token_ids[:number]
    assert cut.behavior_logprobs == pytest.approx(whole.behavior_logprobs[:number], abs=1e-5)
    assert cut.sampling_logprobs == pytest.approx(whole.sampling_logprobs[:number], abs=1e-5)
    assert (cut.finish_reason, cut.is_late) == ("length", True)


@pytest.mark.parametrize("orchestrator", ["native", "jetstream"])
async def test_engine_ends_a_late_response_with_its_tokens(
    bench: Bench, request: pytest.FixtureRequest, orchestrator: str
) -> None:
    loop = bench.loop if orchestrator == "native" else request.getfixturevalue("jetstream_loop")
    ids = bench.ids("late")
    whole = await loop.submit(ids, LONG).result()
    assert (len(whole.token_ids), whole.is_late) == (40, False)
    late, beside = loop.submit(ids, LONG, time_limit=_limit(5.0)), loop.submit(ids, LONG)
    cut = await late.result()
    assert len(cut.token_ids) == 6
    _begins_like(cut, whole)
    assert (await beside.result()).token_ids == whole.token_ids
    ended = TimeLimit()
    generation = loop.submit(ids, LONG, time_limit=ended)
    await anext(generation)
    ended.end()
    cut = await generation.result()
    assert len(cut.token_ids) < 40
    _begins_like(cut, whole)
    await loop.drain()  # all slots are free
