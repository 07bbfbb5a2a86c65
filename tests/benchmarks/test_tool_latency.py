"""Tests of the quantiles of an agent's turns."""

import pytest
from tool_latency import quantiles, turns_of

from lightning_jax.traces import attributes
from lightning_jax.types import Span


def _call(start_s: float, end_s: float, prompt: int, response: int) -> Span:
    tokens = {
        attributes.PROMPT_TOKEN_IDS: [1] * prompt,
        attributes.RESPONSE_TOKEN_IDS: [2] * response,
    }
    return Span("t", "s", None, "chat", int(start_s * 1e9), int(end_s * 1e9), tokens)


def test_turns_are_calls_and_the_gaps_between_them() -> None:
    tool = Span("t", "s", None, "tool", 0, 1, {})
    turns = turns_of(
        [
            [_call(0, 1, 10, 4), tool, _call(1.5, 2, 20, 3), _call(4, 5, 23, 1)],
            [tool],
            [_call(0, 3, 7, 2), _call(1, 2, 7, 2)],  # at once
        ]
    )
    assert turns.num_calls == (3, 2)
    assert turns.first_prompt_tokens == (10, 7)
    assert turns.added_prompt_tokens == (6, 0, 0)
    assert turns.response_tokens == (4, 3, 1, 2, 2)
    assert turns.tool_s == pytest.approx((0.5, 2.0))


def test_quantiles_of_a_few_values() -> None:
    row = quantiles([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (row["0"], row["0.25"], row["0.5"], row["1"]) == (1.0, 2.0, 3.0, 5.0)
    assert (row["mean"], row["number"]) == (3.0, 5)
    assert quantiles([]) == {"number": 0}
