"""What other dialects' messages become: OpenAI's chat form, as `Answer.as_message` makes it.

A dialect whose answer lies in several pieces on the wire puts them together again here, so that the
message is the one that was generated, and comes back as the token ids that were sampled.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import ToolCall
from lightning_jax.gateway.errors import invalid
from lightning_jax.types import Message


def tool_call(name: Any, arguments: Any, call_id: Any, where: str, param: str) -> Message:
    """A call in an assistant's message; `call_id` None where the dialect has none.

    Raises ApiError unless the name is text and the arguments are an object.
    """
    if not isinstance(name, str) or not name:
        raise invalid(
            f"{where}.name is {fields.brief(name)}; expected a function's name.",
            param,
            reason="wrong_type",
            key=f"{where}.name",
        )
    if not isinstance(arguments, dict):
        raise invalid(
            f"{where} has {fields.brief(arguments)}; expected an object.",
            param,
            reason="wrong_type",
            key=f"{where}.arguments",
        )
    written = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}


def add_assistant(messages: list[Message], text: str, calls: Sequence[Message]) -> None:
    """Appends an assistant's turn. One turn may come in pieces, each as a message of its own."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    turn["content"] += text
    if calls:
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *calls]


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """The arguments as an object; None where the token limit cut them."""
    try:
        arguments = json.loads(
            call.arguments or "{}", parse_float=_finite, parse_constant=lambda name: None
        )
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def _finite(text: str) -> float:
    """JSON can write 1e999, which no float holds, but not infinity."""
    largest = sys.float_info.max
    return min(max(float(text), -largest), largest)
