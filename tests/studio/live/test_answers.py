"""Tests of the calls that show what a group's attempts earned their rewards for."""

from dataclasses import replace

import view_records as records

from lightning_jax.studio.live.answers import earning_calls
from lightning_jax.studio.records import CallView, RolloutView, SpanView

CALL = CallView(1, 3, "", "", (), (), "stop", -0.1, (3,), 0.0)


def attempt(index: int, reward: float, *calls: CallView) -> RolloutView:
    numbered = [replace(call, number=number) for number, call in enumerate(calls, start=1)]
    spans = [SpanView("llm", "call", 0, 0.0, 1.0, None, call, "", "", ()) for call in numbered]
    return RolloutView(records.rollout(index, reward), 1.0, tuple(spans))


def said(text: str, agent: str = "", reward: float = 0.0) -> CallView:
    return replace(CALL, text=text, agent=agent, reward=reward)


def shown(*attempts: RolloutView) -> list[list[str]]:
    views = {view.rollout.rollout_id: view for view in attempts}
    return [[call.response for call in calls] for calls in earning_calls(views).values()]


def test_the_last_reply_is_enough_where_it_tells_attempts_apart() -> None:
    found = shown(attempt(0, 1.0, said("look"), said("4")), attempt(1, 0.0, said("5")))
    assert found == [["4"], ["5"]]
    assert shown(attempt(0, 1.0, said("a"), said("4")), attempt(1, 1.0, said("b"), said("4"))) == [
        ["4"],
        ["4"],
    ]


def test_equal_endings_of_different_rewards_show_what_came_before() -> None:
    right = attempt(0, 1.0, said("think"), said("4"), said("CORRECT"), said("done"))
    wrong = attempt(1, 0.0, said("think"), said("5"), said("CORRECT"), said("done"))
    assert shown(right, wrong) == [["4", "CORRECT", "done"], ["5", "CORRECT", "done"]]


def test_each_agent_and_each_rewarded_call_is_shown() -> None:
    view = attempt(
        0,
        1.0,
        said("plan", "planner"),
        said("try", "solver", 0.5),
        said("again", "solver"),
        said("4", "solver"),
        said("CORRECT", "checker"),
    )
    assert shown(view) == [["plan", "try", "4", "CORRECT"]]


def test_attempts_that_no_call_tells_apart_show_their_last() -> None:
    calls = [said("a"), said("b")]
    assert shown(attempt(0, 1.0, *calls), attempt(1, 0.0, *calls)) == [["b"], ["b"]]
    assert shown(attempt(0, 1.0), attempt(1, 0.0)) == [[], []]
