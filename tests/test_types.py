"""Tests that records reject invalid values."""

import pickle

import pytest

from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.errors import InvalidValue, UserError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", ((5, 101.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, float("nan")),)),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("top_logprobs", 21),
        ("grammar", ""),
    ],
)
def test_impossible_sampling_is_refused(name, value) -> None:
    with pytest.raises(InvalidValue) as caught:
        SamplingParams(**{name: value})
    assert caught.value.key == name and repr(value) in str(caught.value)


def test_a_completion_says_for_each_token_whether_it_was_forced() -> None:
    columns = ((1, 2), "ab", (-1.0, -2.0), (-1.0, -2.0), (0, 0), "stop")
    plain = Completion(*columns)
    assert (plain.forced, plain.top_logprobs) == ((False, False), ((), ()))
    with pytest.raises(InvalidValue) as caught:
        Completion(*columns, forced=(True,))
    assert caught.value.reason == "mismatch"


def test_error_carries_reason_and_key() -> None:
    error = InvalidValue("rank is -1; set it to 0 or more", reason="out_of_range", key="rank")
    assert (str(error), error.reason, error.key) == (error.args[0], "out_of_range", "rank")
    assert (UserError("no").reason, UserError("no").key) == ("invalid", None)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reason, copy.key) == (str(error), error.reason, error.key)
