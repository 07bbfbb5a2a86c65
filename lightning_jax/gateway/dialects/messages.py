"""OpenAI's chat format, as `Answer.as_message` returns it, for other dialects' messages.

Some dialects send one answer in several pieces. They are joined again here, so that the message is
the generated one and is rendered with the sampled token ids.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_jax.gateway.answer import Answer, ToolCall
from lightning_jax.types import Message


def tool_call(name: str, arguments: dict[str, Any], call_id: str | None) -> Message:
    """Return a call in an assistant's message. `call_id` is None if the dialect has none."""
    written = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}


def add_assistant(
    messages: list[Message], text: str, calls: Sequence[Message], thought: str = ""
) -> None:
    """Append to the assistant's turn, which may come in pieces, each as a separate message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    turn["content"] += text
    if thought:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
    if calls:
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *calls]


def whole_calls(answer: Answer) -> list[tuple[ToolCall, dict[str, Any]]]:
    """Return the calls with their arguments.

    A call that the token limit cut off is left out: clients would run it incompletely.
    """
    calls = [(call, arguments_of(call)) for call in answer.tool_calls]
    return [(call, arguments) for call, arguments in calls if arguments is not None]


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """Return the arguments as an object, or None if the token limit cut them off."""
    try:
        arguments = json.loads(
            call.arguments or "{}", parse_float=_finite, parse_constant=lambda name: None
        )
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def _finite(text: str) -> float:
    """Clamp a number such as 1e999, which JSON can write, since JSON cannot write infinity."""
    largest = sys.float_info.max
    return min(max(float(text), -largest), largest)
