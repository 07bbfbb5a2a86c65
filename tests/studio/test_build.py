"""Tests that a view of a rollout shows the contents of its spans."""

import math
from typing import Any

import pytest
from view_records import TOKENIZER, call, conversation, rollout, span, tool

from lightning_jax.studio.build import NO_SPANS, newest_first, task_name, view_rollout, view_run
from lightning_jax.studio.records import CallCredit, RolloutView, StepCredit
from lightning_jax.traces import attributes
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.types import Rollout, Span


def _view(spans: list[Span], credit: StepCredit | None = None) -> RolloutView:
    transitions, _, _ = TraceReader().transitions(spans)
    return view_rollout(rollout(0, 1.0), spans, transitions, TOKENIZER, credit or StepCredit())


def test_the_waterfall_has_every_span_in_time() -> None:
    view = _view(conversation())
    assert [(span.kind, span.label, span.depth) for span in view.spans] == [
        ("agent", "rollout", 0),
        ("llm", "1 chat policy", 1),
        ("tool", "search", 1),
        ("llm", "2 chat policy", 1),
    ]
    assert [(span.start_s, span.duration_s) for span in view.spans] == [
        (0, 4),
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    assert view.duration_s == 4.0


def test_a_call_shows_what_is_new_in_its_prompt() -> None:
    first, second = _view(conversation()).calls
    assert (first.shares_with, first.new_text) == (None, "Capital of France?")
    assert (second.shares_with, second.new_text) == (1, " It says: ")
    assert second.shared_text == "Capital of France?search<|im_end|>"
    assert second.num_shared_tokens == 18 + 6 + 1
    assert second.num_prompt_tokens == 25 + 10
    assert second.response == "Paris<|im_end|>"
    assert second.finish_reason == "stop" and second.versions == (3,)
    assert second.mean_logprob == pytest.approx(-0.1 * (1 + 2 + 3 + 4 + 5 + 6) / 6)
    assert [token.text for token in second.tokens] == [*"Paris", "<|im_end|>"]
    assert second.tokens[1].logprob == pytest.approx(-0.2)


def test_interleaved_agents_continue_their_previous_call() -> None:
    spans = [call("w", "writer: ", "x"), call("c", "checker: ", "y", at=1)]
    path = (
        spans[0].attributes[attributes.PROMPT_TOKEN_IDS]
        + spans[0].attributes[attributes.RESPONSE_TOKEN_IDS]
    )
    spans.append(call("w2", [*path, *TOKENIZER.encode("more")], "z", at=2))
    third = _view(spans).calls[2]
    assert (third.shares_with, third.new_text) == (1, "more")


def test_credit_and_rewards_are_shown_at_their_calls() -> None:
    spans = conversation()
    spans[1] = call("a", "Capital of France?", "search", more={attributes.REWARD: -0.25})
    credit = StepCredit({"b": CallCredit(0.75, -1.5)}, ("a note",))
    view = _view(spans, credit)
    assert [call.reward for call in view.calls] == [-0.25, 0.0]
    assert [call.credit for call in view.calls] == [None, CallCredit(0.75, -1.5)]
    assert view.notes == ("a note",)


def test_tool_calls_are_read_as_the_gateway_reads_them() -> None:
    text = 'so <tool_call>[{"name": "search", "arguments": {"query": "a\\u001b"}}]</tool_call>'
    view = _view([call("a", "?", text)])
    assert view.calls[0].tool_calls == (("search", '{"query": "a\\u001b"}'),)
    assert _view([call("a", "?", "no call")]).calls[0].tool_calls == ()


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "sql",
         "gen_ai.tool.call.arguments": "SELECT 1", "gen_ai.tool.call.result": "[[1]]"},
        {"openinference.span.kind": "TOOL", "tool.name": "sql",
         "input.value": "SELECT 1", "output.value": "[[1]]"},
        {"openinference.span.kind": "TOOL", "tool.name": "sql",
         "tool.parameters": "SELECT 1", "output.value": ((1,),)},
    ],
)  # fmt: skip
def test_tools_of_either_convention(attributes: dict[str, object]) -> None:
    (shown,) = _view([span("t", attributes)]).spans
    assert (shown.kind, shown.label) == ("tool", "sql")
    assert (shown.input, shown.output) == ("SELECT 1", "[[1]]")


def test_failures_keep_their_reason() -> None:
    failed = call("a", "?", "lost", more={attributes.ERROR_TYPE: "call_timeout"})
    values = {k: v for k, v in failed.attributes.items() if k != attributes.RESPONSE_TOKEN_IDS}
    spans = [
        span("a", values, name="chat policy", error="it took longer than 1 s"),
        tool("t", "x", "", error="no such table\x1b[31m"),
        span("u", {attributes.ERROR_TYPE: "Boom"}, error=""),
    ]
    view = _view(spans)
    assert [span.error for span in view.spans] == [
        "call_timeout: it took longer than 1 s",
        "Boom",
        "no such table\u241b[31m",
    ]
    (lost,) = view.calls
    assert (lost.new_text, lost.tokens, lost.credit, lost.trains) == ("?", (), None, False)


def test_choices_are_shown_below_their_call() -> None:
    first, second = (
        call(f"c{i}", "?", f"answer {i}", parent="call", more={attributes.CHOICE_INDEX: i})
        for i in (0, 1)
    )
    shared = {
        **{
            attributes.OPERATION_NAME: attributes.CHAT,
            attributes.POLICY: "policy",
            attributes.REQUEST_CHOICE_COUNT: 2,
        },
        attributes.PROMPT_TOKEN_IDS: first.attributes[attributes.PROMPT_TOKEN_IDS],
    }
    view = _view([span("call", shared, name="chat policy"), first, second])
    assert [(span.depth, span.call is not None) for span in view.spans] == [
        (0, False), (1, True), (1, True)
    ]  # fmt: skip
    assert [call.response for call in view.calls] == ["answer 0<|im_end|>", "answer 1<|im_end|>"]


def test_without_a_tokenizer_the_numbers_are_there() -> None:
    spans = conversation()
    view = view_rollout(rollout(0, 1.0), spans, (), None, StepCredit())
    assert [(call.response, len(call.tokens)) for call in view.calls] == [("", 7), ("", 6)]
    assert view.calls[1].num_shared_tokens == 25


def test_spans_of_clients_may_hold_anything() -> None:
    odd: dict[str, Any] = {
        attributes.OPERATION_NAME: ["chat"],
        attributes.REQUEST_CHOICE_COUNT: "many",
        "openinference.span.kind": {"a": 1},
        attributes.INPUT: {"nested": [None]},
        attributes.OUTPUT: 0,
        "\x1b": (),
    }
    (shown,) = _view([span("x", odd, name="")]).spans
    assert (shown.kind, shown.label, shown.call) == ("other", "", None)
    assert (shown.input, shown.output) == ('{"nested": [null]}', "0")
    assert shown.attributes[0] == ("\u241b", "[]")


def test_spans_without_times_do_not_stretch_the_waterfall() -> None:
    spans = [*conversation(), Span("trace", "x", "root", "timeless", 0, 0)]
    view = _view(spans)
    timeless = next(span for span in view.spans if span.label == "timeless")
    assert (timeless.start_s, timeless.duration_s, view.duration_s) == (0.0, 0.0, 4.0)


def test_a_rollout_without_spans_says_so() -> None:
    view = _view([])
    assert view.spans == () and view.duration_s == 0.0
    assert NO_SPANS in view.notes


def test_the_table_counts_calls_and_failures_of_all_that_match() -> None:
    broken: dict[str, Any] = {"status": "agent_failure", "reason": "deadline"}
    matching: list[Rollout] = newest_first(
        [
            rollout(0, 1.0, phase="eval", step=2),
            rollout(0, 1.0, step=1),
            rollout(1, step=1, **broken),
            rollout(0, step=2, **broken),
            rollout(0, step=0, status="infrastructure_failure", reason="call_timeout"),
        ]
    )
    assert [(rollout_.phase, rollout_.step) for rollout_ in matching] == [
        ("train", 2), ("eval", 2), ("train", 1), ("train", 1), ("train", 0)
    ]  # fmt: skip
    view = view_run("run", matching, [(matching[0], conversation()), (matching[1], [])])
    assert [(row.num_calls, row.seconds) for row in view.rows] == [(2, 4.0), (0, 0.0)]
    assert view.num_left_out == 3
    assert view.counts == {"agent_failure": 2, "scored": 2, "infrastructure_failure": 1}
    assert [(failure.reason, failure.count, failure.example) for failure in view.failures] == [
        ("deadline", 2, "train-00002-000-00-1"),
        ("call_timeout", 1, "train-00000-000-00-1"),
    ]


def test_log_probs_that_are_no_number_do_not_break_it() -> None:
    spans = conversation()
    odd = dict(spans[1].attributes) | {attributes.BEHAVIOR_LOGPROBS: (math.nan,) * 7}
    spans[1] = span("a", odd, parent="root", name="chat policy")
    shown = _view(spans).calls[0].mean_logprob
    assert shown is not None and math.isnan(shown)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"database": "shop", "question": "How many\n towns?"}, "t: How many towns?"),
        ({"database": "shop", "prompt": "Add them", "answer": "3"}, "t: Add them"),
        ({"number": "3", "text": "some words", "more": "others"}, "t: some words"),
        ({"database": "shop", "question": "1 + 2", "prompt": "Add"}, "t: 1 + 2"),
        ({"question": " ", "database": "shop"}, "t: shop"),
        ({"question": "x" * 41}, f"t: {'x' * 40}..."),
        ({"question": "\x1b[2J?"}, "t: \u241b[2J?"),
        ({}, "t"),
    ],
)
def test_a_task_is_named_by_its_question(fields: dict[str, str], name: str) -> None:
    assert task_name("t", fields) == name
