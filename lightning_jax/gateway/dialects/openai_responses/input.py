"""Conversion of the items in OpenAI's responses API to chat messages.

One answer of the policy is one assistant message, but this API sends it as several items: one for
its text and one for each call. Items whose ids name the same response are joined again. If a client
left the ids out, adjacent items are joined. So the message is the generated one, and is rendered
with the sampled token ids.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.gateway import fields
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.types import Message

_ROLES = ("user", "system", "developer", "assistant")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ITEM_ID = re.compile(r"(?:msg|fc)_([0-9a-f]+)_\d+")


def item_id(kind: str, token: str, index: int) -> str:
    """Return the id of a response's item: "msg" or "fc", the response's token, the item's index."""
    return f"{kind}_{token}_{index}"


def input_messages(value: Any) -> tuple[Message, ...]:
    """Return the messages in a text or a list of items. Raise ApiError that names the first invalid
    one.
    """
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise _bad("input", value, "a text or a list of items")
    conversation = _Conversation()
    for index, item in enumerate(value):
        _add(conversation, item, f"input[{index}]")
    return tuple(conversation.messages)


@dataclass
class _Conversation:
    """Messages of a conversation while its items are joined."""

    messages: list[Message] = field(default_factory=list)
    _by_response: dict[str, Message] = field(default_factory=dict)

    def add_generated(self, message: Message, generated_id: Any) -> None:
        """Add part of an assistant's turn: text, or one call."""
        match = _ITEM_ID.fullmatch(generated_id) if isinstance(generated_id, str) else None
        response = match and match[1]
        whole = self._by_response.get(response or "") or self._neighbour(message, response)
        if whole is None:
            self.messages.append(message)
            whole = message
        else:
            whole["content"] += message["content"]
            if calls := message.get("tool_calls"):
                whole["tool_calls"] = [*whole.get("tool_calls", ()), *calls]
        if response:
            self._by_response[response] = whole

    def _neighbour(self, message: Message, response: str | None) -> Message | None:
        """Return the previous message if this one can continue it. Two texts are two messages."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or not ("tool_calls" in last or "tool_calls" in message):
            return None
        if response and any(last is known for known in self._by_response.values()):
            return None  # it is part of another response
        return last


def _add(conversation: _Conversation, item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise _bad(where, item, "an object")
    match item.get("type") or "message":
        case "message":
            message = _message(item, where)
            if message["role"] == "assistant":
                conversation.add_generated(message, item.get("id"))
            else:
                conversation.messages.append(message)
        case "function_call":
            call_id, name, arguments = (
                _string(item, key, where) for key in ("call_id", "name", "arguments")
            )
            function = {"name": name, "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            conversation.add_generated(message, item.get("id"))
        case "function_call_output":
            call_id = _string(item, "call_id", where)
            output = _text(item.get("output"), f"{where}.output")
            conversation.messages.append(
                {"role": "tool", "tool_call_id": call_id, "content": output}
            )
        case "reasoning":
            pass  # the policy has no hidden reasoning to continue
        case other:
            raise invalid(
                f"{where}.type is {fields.brief(other)}, which is not supported; expected "
                "message, function_call or function_call_output.",
                "input",
                reason="unsupported",
                key=f"{where}.type",
            )


def _message(item: dict[str, Any], where: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"{where}.role", role, f"one of {', '.join(_ROLES)}", "unknown")
    return {"role": role, "content": _text(item.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise _bad(where, content, "a text or a list of text parts")
    return content


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise _bad(
            where, kind or part, "a text part, because the policy reads only text", "not_text"
        )
    return _string(part, _TEXT_PARTS[kind], where)


def _string(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _bad(f"{where}.{key}", value, "a string")
    return value


def _bad(where: str, value: Any, expected: str, reason: str = "wrong_type") -> ApiError:
    message = f"{where} is {fields.brief(value)}; expected {expected}."
    return invalid(message, "input", reason=reason, key=where)
