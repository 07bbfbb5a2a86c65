"""Messages in the form that chat templates expect, from all variants of OpenAI's chat format."""

from collections.abc import Sequence
from typing import Any

from lightning_jax.errors import InvalidValue, brief
from lightning_jax.gateway.prompt.call_syntax import read_arguments
from lightning_jax.types import Message

ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEMPLATE_KEYS = ("name", "tool_calls", "tool_call_id")


def normalize_messages(messages: Sequence[Any]) -> list[Message]:
    """Return messages as templates expect them: known roles, one text each, tool arguments as
    objects.

    Raise InvalidValue that names the first malformed message.
    """
    if not messages:
        raise _invalid("messages", "is empty; pass at least 1 message.", "empty")
    return [
        normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)
    ]


def normalize_message(message: Any, where: str) -> Message:
    """Return one message as templates expect it. Raise InvalidValue naming it `where`."""
    if not isinstance(message, dict):
        raise _invalid(where, f"is {type(message).__name__}; expected an object.", "wrong_type")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        expected = f"expected one of {', '.join(ROLES)}"
        raise _invalid(f"{where}.role", f"is {brief(role)}; {expected}.", "unknown")
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        problem = f"is set on a {role} message; only assistant messages may have tool calls."
        raise _invalid(f"{where}.tool_calls", problem, "wrong_role")
    extra = {key: message[key] for key in _TEMPLATE_KEYS if message.get(key)}
    if calls:
        extra["tool_calls"] = _tool_calls(calls, where)
    thought = _thought(message) if role == "assistant" else ""
    if thought:
        extra["reasoning_content"] = thought
    content = message.get("content")
    if content is None and not (role == "assistant" and (calls or thought)):
        problem = "is missing; expected a string or a list of text parts."
        raise _invalid(f"{where}.content", problem, "missing")
    return {"role": ROLES[role], "content": _text(content, f"{where}.content"), **extra}


def _thought(message: Message) -> str:
    """Return the thought that clients send beside the text, under one of two names."""
    thoughts = (message.get(key) for key in ("reasoning_content", "reasoning"))
    return next((text for text in thoughts if isinstance(text, str) and text), "")


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        problem = f"is {type(content).__name__}; expected a string or a list of text parts."
        raise _invalid(where, problem, "wrong_type")
    return content


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        problem = f"is of type {brief(kind)}, and the policy reads only text; expected a text part."
        raise _invalid(where, problem, "not_text")
    return _text(part["text"], where)


def _tool_calls(calls: Any, where: str) -> list[Message]:
    """Return the calls with arguments as objects, because templates print them as JSON."""
    normalized = []
    for call in calls if isinstance(calls, list) else [{}]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problem = "is malformed; expected a list of named function calls."
            raise _invalid(f"{where}.tool_calls", problem, "malformed")
        arguments = read_arguments(function.get("arguments"))
        plain = {"name": function["name"], "arguments": arguments}
        normalized.append({"id": call.get("id"), "type": "function", "function": plain})
    return normalized


def _invalid(key: str, problem: str, reason: str) -> InvalidValue:
    return InvalidValue(f"{key} {problem}", reason=reason, key=key)
