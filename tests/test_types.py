"""Tests that records reject invalid values."""

import pickle

import pytest

from lightning_jax.types import Completion, InvalidValue, SamplingParams, UserError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": ((5, 101.0),)}, r"logit_bias is \(\(5, 101.0\),\); expected token ids"),
        ({"logit_bias": ((-1, 1.0),)}, "token ids of 0 or more"),
        ({"logit_bias": ((1, float("nan")),)}, "values between -100 and 100"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; expected between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"top_logprobs": 21}, "top_logprobs is 21; expected between 0 and 20"),
        ({"grammar": ""}, "grammar is ''; expected None"),
    ],
)
def test_impossible_sampling_is_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


def test_a_completion_says_for_each_token_whether_it_was_forced() -> None:
    columns = ((1, 2), "ab", (-1.0, -2.0), (-1.0, -2.0), (0, 0), "stop")
    plain = Completion(*columns)
    assert (plain.forced, plain.top_logprobs) == ((False, False), ((), ()))
    with pytest.raises(ValueError, match="differ in length"):
        Completion(*columns, forced=(True,))


def test_error_carries_reason_and_key() -> None:
    error = InvalidValue("rank is -1; set it to 0 or more", reason="out_of_range", key="rank")
    assert (str(error), error.reason, error.key) == (error.args[0], "out_of_range", "rank")
    assert (UserError("no").reason, UserError("no").key) == ("invalid", None)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reason, copy.key) == (str(error), error.reason, error.key)
