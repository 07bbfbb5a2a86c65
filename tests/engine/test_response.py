"""Tests of the end of a response and of the text shown."""

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.engine.response import Response, SampledToken, StopStrings
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer
from lightning_jax.testing.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def respond(ids: list[int], *, stop: tuple[str, ...] = (), limit: int = 100):
    response = Response(
        StreamDecoder(TOKENIZER), TOKENIZER.eos_ids, SamplingParams(stop=stop), limit
    )
    shown = []
    for token_id in ids:
        chunk, reason = response.push(SampledToken(token_id, -1.0, -2.0, -1.5, 3))
        shown.append(chunk.text)
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
    response = Response(StreamDecoder(TOKENIZER), TOKENIZER.eos_ids, SamplingParams(), 2)
    top = ((7, -0.5), (8, -1.5))
    chunk, _ = response.push(SampledToken(7, -0.5, -0.5, -0.5, 3, forced=True, top_logprobs=top))
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
    assert [going_on.push(SampledToken(t, 0.0, 0.0, 0.0, 0))[1] for t in (eos, 5, eos)] == [
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
        reasons = [response.push(SampledToken(i, 0.0, 0.0, 0.0, 0))[1] for i in ids]
        assert (response.text, reasons[-1]) == (text, "length" if is_ignored else "stop")
        assert response.tokens[-1].token_id == end
