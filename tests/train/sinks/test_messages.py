"""Tests of the messages of a call in the form of the GenAI conventions."""

import json
from typing import Any

from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces import attributes
from lightning_jax.train.sinks import messages
from lightning_jax.train.sinks.messages import describe_call
from lightning_jax.types import Span

TOKENIZER = tiny_tokenizer()
CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
PROMPT = tuple(TOKENIZER.encode(TOKENIZER.render_chat(CHAT)))
TWO = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def _call(response: str, values: dict[str, Any] | None = None, error: str | None = None) -> Span:
    known = {
        attributes.POLICY: "policy",
        attributes.PROMPT_TOKEN_IDS: PROMPT,
        attributes.RESPONSE_TOKEN_IDS: tuple(TOKENIZER.encode(response)),
        attributes.RESPONSE_FINISH_REASONS: ("stop",),
    }
    return Span("a", "b", None, "chat", 0, 1, known | (values or {}), error)


def _described(span: Span) -> dict[str, Any]:
    found = describe_call(span, TOKENIZER)
    return {key.split(".")[1]: json.loads(value) for key, value in found.items()}


def test_a_call_has_its_prompt_and_its_response() -> None:
    assert _described(_call("Two.<|im_end|>")) == {
        "input": [
            {"role": "system", "parts": [{"type": "text", "content": "Add."}]},
            {"role": "user", "parts": [{"type": "text", "content": "1 + 1"}]},
        ],
        "output": [
            {
                "role": "assistant",
                "parts": [{"type": "text", "content": "Two."}],
                "finish_reason": "stop",
            }
        ],
    }


def test_tool_calls_are_parts() -> None:
    (message,) = _described(_call(TWO))["output"]
    assert message["parts"] == [{"type": "tool_call", "name": "add", "arguments": {"a": 1}}]


def test_a_failed_call_has_its_prompt_alone() -> None:
    assert _described(_call("", error="it timed out")).keys() == {"input"}


def test_choices_have_their_responses_and_their_call_the_prompt() -> None:
    several = _call("", {attributes.REQUEST_CHOICE_COUNT: 2})
    choice = _call("Two.", {attributes.CHOICE_INDEX: 1})
    assert _described(several).keys() == {"input"}
    assert _described(choice).keys() == {"output"}


def test_a_call_that_another_server_answered_stays_as_it_is() -> None:
    assert describe_call(Span("a", "b", None, "chat", 0, 1, {"input.value": "{}"}), TOKENIZER) == {}


def test_a_long_prompt_keeps_its_first_and_its_last_messages(monkeypatch: Any) -> None:
    monkeypatch.setattr(messages, "MAX_CHARS", 20)
    chat = [{"role": "user", "content": f"{index}" * 5} for index in range(9)]
    text = TOKENIZER.render_chat(chat, add_generation_prompt=False)
    kept = messages.input_messages(TOKENIZER.encode(text), TOKENIZER)
    texts = [message["parts"][0]["content"] for message in kept]
    assert [texts[0], *texts[2:]] == ["00000", "66666", "77777", "88888"]
    assert kept[1]["role"] == "system" and "5" in texts[1]
