"""Tests of the end of a response and of the text shown."""

import itertools

import pytest
import tokenizers
from engine_bench import Bench
from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.engine.response import Response, SampledToken, StopStrings, TimeLimit
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer
from lightning_jax.testing.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def respond(ids: list[int], *, stop: tuple[str, ...] = (), limit: int = 100):
    response = Response(
        StreamDecoder(TOKENIZER), TOKENIZER.eos_ids, SamplingParams(stop=stop), limit
    )
    shown = []
    for token_id in ids:
        reason = response.push(SampledToken(token_id, -1.0, -2.0, -1.5, 3))
        shown.append(response.chunk().text)
        if reason:
            return response.completion(reason), shown
    raise AssertionError("the response did not end")


def test_a_stop_string_across_tokens_is_cut_and_its_tokens_are_kept():
    ids = TOKENIZER.encode("one;END two")
    completion, shown = respond(ids, stop=("END", "zzz"))
    assert (completion.text, completion.finish_reason, completion.stop) == ("one;", "stop", "END")
    assert completion.token_ids == tuple(ids[:7])  # all sampled ones
    assert "".join(shown) == completion.text
    assert shown[4] == "" and shown[5] == ""  # E and N may start END


def test_forced_tokens_and_alternatives_stay_with_their_tokens():
    sampling = SamplingParams(top_logprobs=2)
    response = Response(StreamDecoder(TOKENIZER), TOKENIZER.eos_ids, sampling, 2)
    top = ((7, -0.5), (8, -1.5))
    response.push(SampledToken(7, -0.5, -0.5, -0.5, 3, forced=True, top_logprobs=top))
    chunk = response.chunk()
    assert (chunk.forced, chunk.top_logprobs) == ((True,), (top,))
    response.push(SampledToken(8, -1.0, -1.0, -1.0, 3))
    completion = response.completion("length")
    assert (completion.forced, completion.top_logprobs) == ((True, False), (top, ()))


def test_text_held_back_for_a_stop_string_appears_if_none_comes():
    completion, _ = respond(TOKENIZER.encode("EN"), stop=("END",), limit=2)
    assert (completion.text, completion.finish_reason) == ("EN", "length")
    assert completion.policy_versions == (3, 3)


def test_end_of_turn_is_kept_as_token_and_not_shown():
    eos = min(TOKENIZER.eos_ids)
    sampling = SamplingParams(ignore_eos=True)
    going_on = Response(StreamDecoder(TOKENIZER), TOKENIZER.eos_ids, sampling, 3)
    assert [going_on.push(SampledToken(t, 0.0, 0.0, 0.0, 0)) for t in (eos, 5, eos)] == [
        None,
        None,
        "length",
    ]
    completion, _ = respond([*TOKENIZER.encode("hi"), eos])
    assert (completion.text, completion.finish_reason) == ("hi", "stop")
    assert completion.token_ids[-1] == eos


def test_end_of_turn_at_the_limit_is_a_stop():
    completion, _ = respond([min(TOKENIZER.eos_ids)], limit=1)
    assert completion.finish_reason == "stop"


def test_characters_of_several_bytes_are_shown_whole():
    completion, shown = respond(TOKENIZER.encode("aé€"), limit=6)
    assert completion.text == "aé€"
    assert [text for text in shown if text] == ["a", "é", "€"]


@pytest.mark.parametrize(
    ("pushed", "shown"),
    [
        (["abc"], "abc"),
        (["xaab"], "x"),  # of "aab" and "b", the one that starts first
        (["xa", "ay"], "xaay"),
        (["a", "a", "a", "b"], "a"),
    ],
)
def test_stop_strings_hold_back_only_what_may_be_one(pushed, shown):
    stops = StopStrings(("aab",))
    text = ""
    for i, piece in enumerate(pushed):
        part, stopped = stops.push(piece, final=i == len(pushed) - 1)
        text += part
        if stopped:
            break
    assert text == shown


@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
    text=st.text("abcd", max_size=12),
    cuts=st.sets(st.integers(0, 12)),
)
def test_a_stop_string_cuts_the_same_text_in_any_split(stops, text, cuts):
    def run(offsets):
        strings, shown = StopStrings(tuple(stops)), ""
        for start, end in itertools.pairwise(offsets):
            part, stop = strings.push(text[start:end], final=end == len(text))
            shown += part
            if stop:
                return shown, stop
        return shown, ""

    ends = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    letters = list(range(len(text) + 1))
    first = next((n for n in letters if any(text[:n].endswith(stop) for stop in stops)), None)
    if first is None:
        wanted = (text, "")
    else:
        longest = max((stop for stop in stops if text[:first].endswith(stop)), key=len)
        wanted = (text[: first - len(longest)], longest)
    assert run(ends) == run(letters) == wanted


def test_the_end_of_turn_is_not_shown_even_if_it_is_no_special_token():
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    backend.add_tokens([tokenizers.AddedToken("[END]", special=False)])
    (end,) = backend.encode("[END]").ids
    tokenizer = Tokenizer(backend, eos_ids=[end])
    for is_ignored, text in ((False, "hi"), (True, "hi[END]")):
        sampling = SamplingParams(ignore_eos=is_ignored)
        response = Response(StreamDecoder(tokenizer), tokenizer.eos_ids, sampling, 3)
        ids = (*tokenizer.encode("hi"), end)
        *_, reason = [response.push(SampledToken(i, 0.0, 0.0, 0.0, 0)) for i in ids]
        assert reason == ("length" if is_ignored else "stop")
        assert response.completion("length" if is_ignored else "stop").text == text
        assert response.last_id == end


def _limit(seconds: float | None) -> TimeLimit:
    """Return a limit whose clock goes a second further at each token."""
    return TimeLimit(seconds, itertools.count(100.0).__next__)


def test_the_time_begins_with_the_first_token_and_may_stand_still() -> None:
    limit = TimeLimit(3.0)
    assert not limit.is_over(90.0)
    assert not limit.is_over(92.9)
    assert not limit.is_over(95.0 - 2.5) and limit.is_over(95.0)
    without = TimeLimit(None)
    assert not without.is_over(95.0)
    without.end()
    assert without.is_over(95.0)


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
        ended = response.push(SampledToken(token_id, -1.0, -2.0, -1.5, 3))
        shown += response.chunk().text
        if ended:
            break
    assert ended is not None and ended == reason
    found = response.completion(ended)
    assert (found.is_late, len(found.token_ids), found.text) == (is_late, 3, shown)
    assert found.behavior_logprobs == (-1.0,) * 3
    assert shown == (text[:3] if reason == "length" else "a")


def test_a_standstill_of_the_engine_does_not_count() -> None:
    tokenizer = tiny_tokenizer()
    decoder = StreamDecoder(tokenizer)
    response = Response(decoder, tokenizer.eos_ids, SamplingParams(), 99, _limit(2.0))
    token = SampledToken(tokenizer.encode("a")[0], -1.0, -2.0, -1.5, 3)
    reasons = [response.push(token, stalled_s) for stalled_s in (0.0, 0.5, 1.0, 1.5, 2.0)]
    assert reasons == [None] * 4 + ["length"]


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
