"""Tests that spans become Transitions, and that each span that does not is counted."""

import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_jax.errors import InvalidValue
from lightning_jax.traces import attributes
from lightning_jax.traces.convert import spans_to_transitions, to_trajectory
from lightning_jax.types import Rollout, Span, Trajectory, Transition

CALL: dict[str, Any] = {
    attributes.OPERATION_NAME: "chat",
    attributes.ROLLOUT_ID: "r1",
    attributes.AGENT: "writer",
    attributes.POLICY: "policy:writer",
    attributes.PROMPT_TOKEN_IDS: (1, 2),
    attributes.RESPONSE_TOKEN_IDS: (3, 4),
    attributes.BEHAVIOR_LOGPROBS: (-0.5, -0.25),
    attributes.SAMPLING_LOGPROBS: (0.0, -0.125),
    attributes.POLICY_VERSIONS: (6, 7),
    attributes.RESPONSE_FINISH_REASONS: ("length",),
}


def _span(
    span_id: str, start_ns: int, attributes: dict[str, Any], error: str | None = None
) -> Span:
    return Span("t" * 32, span_id, None, "chat policy", start_ns, start_ns + 1, attributes, error)


def test_a_call_is_one_transition() -> None:
    transitions, reasons = spans_to_transitions([_span("s1", 5, CALL)])
    assert transitions == (
        Transition(
            call_id="s1",
            rollout_id="r1",
            prompt_token_ids=(1, 2),
            response_token_ids=(3, 4),
            behavior_logprobs=(-0.5, -0.25),
            sampling_logprobs=(0.0, -0.125),
            policy_versions=(6, 7),
            finish_reason="length",
            agent="writer",
            policy="policy:writer",
        ),
    )
    assert reasons == {}


def test_forced_tokens_are_read_and_old_spans_have_none() -> None:
    forced = _span("new", 1, CALL | {attributes.FORCED: (True, False)})
    transitions, _ = spans_to_transitions([forced, _span("old", 2, CALL)])
    assert [t.forced for t in transitions] == [(True, False), (False, False)]
    with pytest.raises(InvalidValue) as caught:
        spans_to_transitions([_span("torn", 1, CALL | {attributes.FORCED: (True,)})])
    assert caught.value.reason == "mismatch"


def test_tokens_that_only_a_grammar_makes_nearly_certain_count_as_forced() -> None:
    """The third token is certain without the grammar, and the fifth is a real choice under it."""
    free = tuple(map(math.log, (0.3, 0.9, 0.9995, 0.2, 0.3)))
    masked = tuple(map(math.log, (0.9995, 0.9991, 0.9999, 1.0, 0.998)))
    call = CALL | {
        attributes.RESPONSE_TOKEN_IDS: (3, 4, 5, 6, 7),
        attributes.POLICY_VERSIONS: (6,) * 5,
        attributes.BEHAVIOR_LOGPROBS: free,
        attributes.SAMPLING_LOGPROBS: masked,
    }
    by_grammar = call | {attributes.GRAMMAR: "start: /a+/"}
    warm = by_grammar | {
        attributes.REQUEST_TEMPERATURE: 2.0,
        attributes.TEMPERED_LOGPROBS: (*free[:1], masked[1], *free[2:]),
    }
    marked = by_grammar | {attributes.FORCED: (False, False, False, True, False)}
    cold = by_grammar | {attributes.REQUEST_TEMPERATURE: 0.05}
    spans = [_span(str(i), i, it) for i, it in enumerate((by_grammar, warm, marked, cold, call))]
    transitions, _ = spans_to_transitions(spans)
    nearly = (True, True, False, True, False)
    assert [t.forced for t in transitions] == [
        nearly, (True, False, False, True, False), nearly, (False,) * 5, (False,) * 5
    ]  # fmt: skip
    assert [t.grammar for t in transitions] == ["start: /a+/"] * 3 + [None] * 2


def test_the_temperature_of_a_call_comes_with_its_logprobs() -> None:
    warm = CALL | {attributes.REQUEST_TEMPERATURE: 1.25, attributes.TEMPERED_LOGPROBS: (-0.7, -0.3)}
    cold = warm | {attributes.REQUEST_TEMPERATURE: 0.05}  # nearly greedy
    old = CALL | {attributes.REQUEST_TEMPERATURE: 0.7}  # recorded without them
    spans = [_span(str(i), i, version) for i, version in enumerate((warm, cold, old))]
    found = [(t.temperature, t.tempered_logprobs) for t in spans_to_transitions(spans)[0]]
    assert found == [(1.25, (-0.7, -0.3)), (1.0, ()), (1.0, ())]


def test_calls_come_in_the_order_they_started() -> None:
    spans = [_span("late", 9, CALL), _span("early", 1, CALL | {attributes.REWARD: 0.5})]
    transitions, _ = spans_to_transitions(spans)
    assert [(t.call_id, t.reward) for t in transitions] == [("early", 0.5), ("late", 0.0)]
    assert [span.span_id for span in spans] == ["late", "early"]


def test_what_cannot_be_trained_on_is_counted() -> None:
    no_logprobs = {k: v for k, v in CALL.items() if k != attributes.BEHAVIOR_LOGPROBS}
    spans = [
        _span("a", 1, CALL, error="broke"),
        _span("b", 2, CALL | {attributes.ERROR_TYPE: "call_timeout"}, error="slow"),
        _span("c", 3, CALL | {attributes.ERROR_TYPE: "call_timeout"}, error="slow"),
        _span("d", 4, CALL | {attributes.RESPONSE_TOKEN_IDS: ()}),
        _span("e", 5, CALL | {attributes.PROMPT_TOKEN_IDS: ()}),
        _span("f", 6, no_logprobs),
        _span("tool", 7, {attributes.OPERATION_NAME: "execute_tool"}),
        _span("broken tool", 8, {}, error="broke"),
    ]
    transitions, reasons = spans_to_transitions(spans)
    assert transitions == ()
    assert reasons == {"call_error": 1, "call_timeout": 2, "empty_response": 2, "no_logprobs": 1}


def test_choices_are_transitions_and_their_call_is_not() -> None:
    call = {attributes.OPERATION_NAME: "chat", attributes.REQUEST_CHOICE_COUNT: 2}
    call[attributes.PROMPT_TOKEN_IDS] = (1, 2)
    spans = [
        _span(
            "second", 1, CALL | {attributes.CHOICE_INDEX: 1, attributes.RESPONSE_TOKEN_IDS: (8, 9)}
        ),
        _span("call", 1, call),
        _span("first", 1, CALL | {attributes.CHOICE_INDEX: 0}),
    ]
    transitions, reasons = spans_to_transitions(spans)
    assert [t.call_id for t in transitions] == ["first", "second"]
    assert reasons == {}


def test_nothing_gives_nothing() -> None:
    assert spans_to_transitions([]) == ((), {})


def test_a_trajectory_needs_a_reward() -> None:
    rollout = Rollout("r1", "t1", "g1", "train", 0, 0, 1, "scored", reward=0.5)
    transitions, _ = spans_to_transitions([_span("s1", 5, CALL)])
    assert to_trajectory(rollout, transitions) == Trajectory("r1", "g1", transitions, 0.5)
    with pytest.raises(InvalidValue) as caught:
        to_trajectory(replace(rollout, status="running", reward=None), transitions)
    assert (caught.value.key, caught.value.reason) == ("r1", "no_reward")
