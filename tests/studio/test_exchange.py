"""Tests of calls that another server answered: their requests and answers in several formats."""

import json
from typing import Any

import pytest
from rich.console import Console
from view_records import rollout, span

from lightning_jax.studio.build import view_rollout
from lightning_jax.studio.exchange import read_exchange
from lightning_jax.studio.records import RolloutView, StepCredit
from lightning_jax.studio.terminal import render_rollout
from lightning_jax.traces import attributes

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "add"}}],
}
CHAT_MESSAGES = (
    "tools: add",
    "system: Be brief.",
    "user: 1 + 1?",
    'assistant: calls add({"a": 1})',
    "tool: 2",
)


def _chat(message: dict[str, Any], reason: str = "stop") -> str:
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": reason}
    return json.dumps({"choices": [choice], "usage": USAGE})


def _streamed(*deltas: dict[str, Any]) -> str:
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices.append([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    events = [*({"choices": choice} for choice in choices), {"choices": [], "usage": USAGE}]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def test_chat_completions_are_read() -> None:
    found = read_exchange(json.dumps(CHAT), _chat({"content": "2\x1b"}))
    assert found.messages == CHAT_MESSAGES
    assert (found.response, found.tool_calls, found.finish_reason) == ("2␛", (), "stop")
    assert (found.num_prompt_tokens, found.num_response_tokens) == (7, 2)
    called = read_exchange(json.dumps(CHAT), _chat({"content": None, "tool_calls": [CALL]}))
    assert (called.response, called.tool_calls) == ("", (("add", '{"a": 1}'),))


def test_a_stream_reads_as_the_whole_answer() -> None:
    parts = [{"index": 0, "function": {"name": "add", "arguments": '{"a'}}]
    rest = [{"index": 0, "function": {"arguments": '": 1}'}}]
    answer = _streamed({"content": "I "}, {"content": "add"}, {"tool_calls": parts})
    assert read_exchange("{}", answer).response == "I add"
    found = read_exchange("{}", _streamed({"tool_calls": parts}, {"tool_calls": rest}))
    assert found.tool_calls == (("add", '{"a": 1}'),)
    assert (found.finish_reason, found.num_prompt_tokens, found.num_response_tokens) == (
        *("stop", 7, 2),
    )


@pytest.mark.parametrize(
    ("request_body", "reply", "messages", "calls"),
    [
        (
            {"instructions": "Be brief.", "input": "Hi"},
            {
                "status": "completed",
                "output": [
                    {"type": "message", "content": [{"type": "output_text", "text": "Hello"}]},
                    {"type": "function_call", "name": "add", "arguments": "{}"},
                ],
                "usage": {"input_tokens": 3, "output_tokens": 4},
            },
            ("system: Be brief.", "user: Hi"),
            (("add", "{}"),),
        ),
        (
            {"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]},
            {
                "stop_reason": "tool_use",
                "content": [
                    {"type": "text", "text": "Hello"},
                    {"type": "tool_use", "name": "add", "input": {"a": 1}},
                ],
                "usage": {"input_tokens": 3, "output_tokens": 4},
            },
            ("system: Be brief.", "user: Hi"),
            (("add", '{"a": 1}'),),
        ),
    ],
)
def test_responses_and_anthropics_messages_are_read(
    request_body: Any, reply: Any, messages: Any, calls: Any
) -> None:
    found = read_exchange(json.dumps(request_body), json.dumps(reply))
    assert (found.messages, found.response, found.tool_calls) == (messages, "Hello", calls)
    assert (found.num_prompt_tokens, found.num_response_tokens) == (3, 4)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1]", "null", "x" * 9, "[" * 100_000),
        *(
            '{"choices": [3]}',
            '{"output": [1]}',
            '{"usage": 3}',
            '{"content": [{"type": 1}], "usage": 1}',
        ),
        'data: {"choices": [{"delta": {"content": [1]}}]}',
        'data: {"choices": [{"delta": {"tool_calls": [1]}}]}',
        '{"choices": [{"message": {"content": "x", "tool_calls": [{}]}}]}',
    ],
)
def test_anything_else_is_shown_as_it_is(text: str) -> None:
    assert read_exchange(text, text).response == text
    assert read_exchange(text, text).tool_calls == ()


def _remote(span_id: str, messages: list[Any], *, at: float, **more: Any) -> Any:
    values = {
        attributes.OPERATION_NAME: attributes.CHAT,
        attributes.POLICY: "policy",
        attributes.SERVED_BY: "http://far/v1",
        attributes.INPUT: json.dumps({"messages": messages}),
        attributes.OUTPUT: _chat({"content": "2"}),
    }
    return span(span_id, values, at=at, name="chat policy", **more)


def _view() -> RolloutView:
    first = [{"role": "user", "content": "1 + 1?"}]
    then = [*first, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    spans = [
        _remote("a", first, at=0.0),
        _remote("b", then, at=1.0),
        _remote("c", then, at=2.0, error="it is down"),
    ]
    return view_rollout(rollout(0, 1.0), spans, (), None, StepCredit())


def test_calls_of_another_server_are_calls() -> None:
    first, second, failed = _view().calls
    assert (first.number, first.response, first.served_by) == (1, "2", "http://far/v1")
    assert (second.shares_with, second.num_shared_messages) == (1, 2)
    assert second.new_text == "user: Sure?"
    assert failed.response == "" and failed.shares_with == 2
    console = Console(width=100)
    with console.capture() as captured:
        console.print(render_rollout(_view(), 100))
    printed = captured.get()
    assert "3 calls" in printed and "7 + 2 tokens" in printed
    assert "2 messages as call 1" in printed and "failed: it is down" in printed


RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
USE = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}


@pytest.mark.parametrize(
    ("dialect", "body", "messages"),
    [
        (
            "anthropic",
            {
                "messages": [
                    {"role": "user", "content": "1 + 1?"},
                    {"role": "assistant", "content": [USE]},
                    {"role": "user", "content": [RESULT]},
                ],
            },
            ("user: 1 + 1?", 'assistant: calls add({"a": 1})', "tool: 2"),
        ),
        ("gemini", {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}, ("user: Hi",)),
        ("ollama", {"model": "m", "prompt": "Hi"}, ("user: Hi",)),
        ("completions", {"prompt": [1, 2]}, ("user: [1, 2]",)),
    ],
)
def test_the_dialect_of_a_call_reads_its_request(dialect: str, body: Any, messages: Any) -> None:
    assert read_exchange(json.dumps(body), "", dialect).messages == messages


def test_fields_that_the_gateway_refuses_hide_no_message(caplog: pytest.LogCaptureFixture) -> None:
    refused = {"guided_regex": "x", "temperature": "hot", "n": 10**6, "invented": 1}
    body = json.dumps(CHAT | refused | {"tool_choice": "sideways"})
    assert read_exchange(body, "", "chat").messages == CHAT_MESSAGES
    assert caplog.text == ""


@pytest.mark.parametrize(
    "body",
    [
        {"system": "Look.", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": "none"},
        {"messages": [{"role": "assistant", "tool_calls": [1]}]},
        {"instructions": "Look.", "input": [{"type": "unknown"}]},
        {"messages": [{"role": "user", "content": json.loads("[" * 200 + "]" * 200)}]},
    ],
)
def test_requests_that_no_dialect_reads_are_shown_whole(body: Any) -> None:
    assert read_exchange(json.dumps(body), "").messages == (json.dumps(body),)
