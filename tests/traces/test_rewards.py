"""Tests that rules and posted rewards reach the call that caused them, or are counted as lost."""

from typing import Any

from lightning_jax.traces import attributes
from lightning_jax.traces.config import RewardRule
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.traces.rewards import apply_rules, observation
from lightning_jax.types import Span, Transition

WORDS = {1: "go", 2: "a", 3: "b", 7: "Error: no such column", 8: "Result, 0 rows:"}


def _decode(ids: Any) -> str:
    return "\n".join(WORDS[i] for i in ids)


def _call(name: str, start: int, prompt: tuple[int, ...], response: tuple[int, ...], **more: Any):
    size = len(response)
    values = {
        attributes.OPERATION_NAME: "chat",
        attributes.ROLLOUT_ID: "r1",
        attributes.POLICY: "policy",
        attributes.AGENT: "writer",
        attributes.RESPONSE_ID: f"id-{name}",
        attributes.PROMPT_TOKEN_IDS: prompt,
        attributes.RESPONSE_TOKEN_IDS: response,
        attributes.BEHAVIOR_LOGPROBS: (-1.0,) * size,
        attributes.SAMPLING_LOGPROBS: (-1.0,) * size,
        attributes.POLICY_VERSIONS: (0,) * size,
        attributes.RESPONSE_FINISH_REASONS: ("stop",),
    }
    return Span("t", name, None, "chat", start, start + 1, values | more)


def _tool(start: int, error: str | None = None, **more: Any) -> Span:
    what = {attributes.OPERATION_NAME: "execute_tool"} | more
    return Span("t", f"tool{start}", None, "tool", start, start + 1, what, error)


def _posted(call: str, reward: float, **more: Any) -> Span:
    values = {attributes.ROLLOUT_ID: "r1", attributes.REWARD: reward, attributes.REWARD_CALL: call}
    return Span("t", f"reward {call} {reward}", None, "reward", 50, 50, values | more)


def _rewards(
    spans: list[Span], **rules: RewardRule
) -> tuple[dict[str, float], dict[str, int], tuple[Transition, ...]]:
    transitions, _ = spans_to_transitions(spans)
    rewarded, counts = apply_rules(spans, transitions, rules, _decode)
    return {call.call_id: call.reward for call in rewarded}, counts, rewarded


def test_a_failed_tool_costs_the_call_that_asked_for_it() -> None:
    slow = {attributes.ERROR_TYPE: "TimeoutError"}
    spans = [
        _call("first", 0, (1,), (2,)),
        _tool(2, error="division by zero"),
        _call("second", 4, (1, 2, 3), (2,)),
        _tool(6, error="30 s are over", **slow),
        _tool(8, error="and again", **slow),
    ]
    rewards, counts, _ = _rewards(
        spans, failed=RewardRule("tool_error", -0.5), slow=RewardRule("tool_timeout", -0.25)
    )
    assert rewards == {"first": -0.5, "second": -1.5}
    assert counts == {"failed": 3, "slow": 2}


def test_next_agent_text_is_the_observation() -> None:
    spans = [
        _call("first", 0, (1,), (2,)),
        _call("aside", 1, (3,), (2,)),
        _call("second", 2, (1, 2, 7), (3,)),
        _call("third", 4, (1, 2, 7, 3, 8), (2,)),
    ]
    transitions, _ = spans_to_transitions(spans)
    observations = [observation(call, transitions, _decode) for call in transitions]
    assert observations == ["Error: no such column", None, "Result, 0 rows:", None]
    rewards, counts, _ = _rewards(
        spans,
        invalid_sql=RewardRule("observation", -0.2, pattern="^Error:"),
        empty_result=RewardRule("observation", -0.1, pattern=r"\b0 rows"),
    )
    assert rewards == {"first": -0.2, "aside": 0.0, "second": -0.1, "third": 0.0}
    assert counts == {"invalid_sql": 1, "empty_result": 1}


def test_other_facts_of_a_call() -> None:
    cut = {attributes.RESPONSE_FINISH_REASONS: ("length",)}
    spans = [
        _call("cut", 0, (1,), (2,), **cut),
        _call(
            "odd",
            2,
            (1,),
            (3,),
            **{attributes.MALFORMED_TOOL_CALLS: 2, attributes.AGENT: "checker"},
        ),
        _tool(5, **{attributes.TOOL_RESULT: "nothing found"}),
    ]
    rewards, counts, _ = _rewards(
        spans,
        cut=RewardRule("cut_short", -1.0),
        odd=RewardRule("malformed_call", -0.25),
        empty=RewardRule("tool_output", -2.0, pattern="nothing"),
        right=RewardRule("response", 8.0, pattern="^b$", agent="check*"),
        other=RewardRule("response", 100.0, pattern="a", agent="check*"),
    )
    assert rewards == {"cut": -1.0, "odd": -0.5 - 2.0 + 8.0}
    assert counts == {"cut": 1, "odd": 2, "empty": 1, "right": 1}


def test_what_no_trained_call_brought_about_is_counted() -> None:
    rewards, counts, _ = _rewards([_tool(0, error="x")], broke=RewardRule("tool_error", -1.0))
    assert (rewards, counts) == ({}, {"broke_without_call": 1})


def test_posted_rewards_are_added_to_their_calls() -> None:
    choices = [
        _call(
            f"choice{i}",
            4,
            (1,),
            (2 + i,),
            **{attributes.CHOICE_INDEX: i, attributes.RESPONSE_ID: None},
        )
        for i in range(2)
    ]
    many = _call("many", 4, (1,), (), **{attributes.REQUEST_CHOICE_COUNT: 2})
    spans = [
        _call("one", 0, (1,), (2,)),
        many,
        *[Span("t", s.span_id, "many", s.name, 4, 5, s.attributes) for s in choices],
        _posted("id-one", 0.5),
        _posted("id-one", 0.25),
        _posted("id-many", 1.0, **{attributes.REWARD_CHOICE: 1}),
        _posted("id-gone", 9.0),
    ]
    transitions, reasons = spans_to_transitions(spans)
    assert {t.call_id: t.reward for t in transitions} == {
        "one": 0.75,
        "choice0": 0.0,
        "choice1": 1.0,
    }
    assert reasons == {"reward_without_call": 1}


def test_spans_of_agent_instrumentation_are_no_calls() -> None:
    theirs = Span("t", "x", None, "chat", 0, 1, {attributes.OPERATION_NAME: "chat"})
    proxied = _call("far", 0, (1,), (2,), **{attributes.SERVED_BY: "http://x/v1"})
    assert spans_to_transitions([theirs, proxied]) == ((), {"served_elsewhere": 1})
