"""Messages of a recorded call, as the GenAI conventions have them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_jax.gateway.prompt.tool_formats import open_thought
from lightning_jax.gateway.prompt.turns import as_arguments, read_prompt, read_response
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.traces import attributes
from lightning_jax.traces.otlp import clip
from lightning_jax.traces.tree import has_choice_spans
from lightning_jax.types import Span

MAX_CHARS = 2**18  # of a prompt's texts
Message = dict[str, Any]


def describe_call(span: Span, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the attributes with the messages of a call that a policy answered, as JSON.

    The prompt of several choices is on their call's span, and each response on its own.
    """
    values = span.attributes
    prompt = tuple(values.get(attributes.PROMPT_TOKEN_IDS, ()))
    if not prompt:  # another server answered
        return {}
    messages: dict[str, Any] = {}
    if attributes.CHOICE_INDEX not in values:
        messages[attributes.INPUT_MESSAGES] = input_messages(prompt, tokenizer)
    if not has_choice_spans(span) and span.error is None:
        messages[attributes.OUTPUT_MESSAGES] = [output_message(values, prompt, tokenizer)]
    return {key: json.dumps(value, ensure_ascii=False) for key, value in messages.items()}


def input_messages(prompt: Sequence[int], tokenizer: Tokenizer) -> list[Message]:
    """Return the messages of a prompt. Of a long one the second and next ones are left out."""
    turns = [(role, clip(text)) for role, text in read_prompt(prompt, tokenizer)]
    left = MAX_CHARS - sum(len(text) for _, text in turns[:1])
    last: list[tuple[str, str]] = []
    for role, text in reversed(turns[1:]):
        left -= len(text)
        if left < 0:
            break
        last.insert(0, (role, text))
    num_omitted = len(turns) - len(last) - 1
    note = [("system", f"[{num_omitted} messages left out]")] if num_omitted > 0 else []
    kept = [*turns[:1], *note, *last]
    return [{"role": role, "parts": [_text_part(text)]} for role, text in kept]


def output_message(
    values: Mapping[str, Any], prompt: Sequence[int], tokenizer: Tokenizer
) -> Message:
    """Return the message of a response, from the attributes of its span."""
    response = tuple(values.get(attributes.RESPONSE_TOKEN_IDS, ()))
    # A grammar leaves no room for thoughts.
    thought = "" if attributes.FORCED in values else open_thought(prompt, tokenizer)
    text, calls = read_response(response, tokenizer, thought)
    parts = [_text_part(clip(text))] if text else []
    parts += [
        {"type": "tool_call", "name": name, "arguments": as_arguments(clip(words))}
        for name, words in calls
    ]
    reasons = values.get(attributes.RESPONSE_FINISH_REASONS, ())
    return {"role": "assistant", "parts": parts, "finish_reason": str((*reasons, "error")[0])}


def _text_part(text: str) -> Message:
    return {"type": "text", "content": text}
