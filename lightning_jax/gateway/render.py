"""Messages to prompt ids: text that the policy generated comes back as the very ids it sampled.

A response that returns in a later prompt must not be encoded again: the same text has many
encodings, and training would then see another token path than the one sampled. So the template
renders a mark in the place of that text, the pieces between marks are encoded, and the recorded ids
go between them:

    text     <start>user hi<end><start>assistant   MARK     <end><start>user more...
    ids      [1 5 6 2 1 8]                         [40 2]   [2 1 5 9 ...]
    prompt   [1 5 6 2 1 8 40 2 1 5 9 ...]          the end-of-turn token 2 is kept once
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.types import Message

ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEMPLATE_KEYS = ("name", "tool_calls", "tool_call_id")


@dataclass(frozen=True)
class Generated:
    """One response as it was sampled: what the policy had read, and the ids it gave."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class ConversationMemory:
    """What the policy generated in one rollout, by the text that the agent was given."""

    def __init__(self) -> None:
        self._generated: dict[str, list[Generated]] = {}

    def add(self, text: str, generated: Generated) -> None:
        """Remembers a response. Responses without text or ids have nothing to recognise."""
        if text and generated.token_ids:
            self._generated.setdefault(text, []).append(generated)

    def recall(self, text: str) -> tuple[Generated, ...]:
        """The responses that gave this text, newest first."""
        return tuple(reversed(self._generated.get(text, ())))


@dataclass(frozen=True)
class Rendered:
    """A prompt, and how the responses that it replays came out."""

    token_ids: tuple[int, ...]
    replayed: int  # messages rendered with the ids that were sampled
    breaks: int  # 1 if the last replayed response's path is not a prefix of this prompt, else 0


def render(
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None,
    tokenizer: Tokenizer,
    memory: ConversationMemory | None = None,
) -> Rendered:
    """The prompt ids of a conversation, up to the assistant's next turn; `memory` stays as it is.

    Raises ValueError for messages or tools that the chat template cannot show.
    """
    plain = normalize_messages(messages)
    known = {
        index: memory.recall(message["content"])
        for index, message in enumerate(plain)
        if memory and message["role"] == "assistant" and "tool_calls" not in message
    }
    known = {index: found for index, found in known.items() if found}
    pieces, spliced = _pieces(plain, tools, tokenizer, tuple(known))
    ids, extends = _splice(pieces, [known[index] for index in spliced], tokenizer)
    lost = len(spliced) < len(known)
    return Rendered(tuple(ids), len(spliced), int(lost or not extends))


def _pieces(
    messages: list[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    tokenizer: Tokenizer,
    replayed: tuple[int, ...],
) -> tuple[list[str], list[int]]:
    """The rendered text cut at the replayed messages, and which messages those are.

    A template may drop or rewrite a message; then its mark is not found, and the template gets the
    text itself.
    """
    marks = {index: _mark(messages, index) for index in replayed}
    marked = [
        message | {"content": marks[index]} if index in marks else message
        for index, message in enumerate(messages)
    ]
    text = _template(marked, tools, tokenizer)
    if not all(text.count(mark) == 1 for mark in marks.values()):
        found = tuple(index for index, mark in marks.items() if text.count(mark) == 1)
        return _pieces(messages, tools, tokenizer, found)
    order = sorted(marks, key=lambda index: text.index(marks[index]))
    pieces = []
    for index in order:
        piece, _, text = text.partition(marks[index])
        pieces.append(piece)
    return [*pieces, text], order


def _splice(
    pieces: Sequence[str], candidates: Sequence[tuple[Generated, ...]], tokenizer: Tokenizer
) -> tuple[list[int], bool]:
    """The pieces' ids with recorded ids between; False if the last record is not a prefix."""
    ids = tokenizer.encode(pieces[0])
    extends = True
    for found, piece in zip(candidates, pieces[1:], strict=True):
        # One text may have been sampled twice, as different ids: take those sampled right here.
        chosen = next((g for g in found if g.prompt_ids == tuple(ids)), found[0])
        extends = chosen.prompt_ids == tuple(ids)
        ids = [*ids, *chosen.token_ids]
        tail = tokenizer.encode(piece)
        end = chosen.token_ids[-1]
        ids += tail[1:] if end in tokenizer.eos_ids and tail[:1] == [end] else tail
    return ids, extends


def _template(
    messages: list[Message], tools: Sequence[Mapping[str, Any]] | None, tokenizer: Tokenizer
) -> str:
    text = tokenizer.render_chat(messages, tools=tools)
    if tools and text == tokenizer.render_chat(messages):
        raise ValueError(
            f"tools has {len(tools)} entries, but the model's chat template has no place for them; "
            "expected none. Describe them in the system message instead."
        )
    for message in messages:
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                raise ValueError(
                    f"tool_calls holds {call['function']['name']!r}, but the model's chat template "
                    "shows no tool calls; expected none. Write the call as text content instead."
                )
    return text


def _mark(messages: list[Message], index: int) -> str:
    """A text that no message holds, because it hashes them all."""
    whole = json.dumps(messages, sort_keys=True).encode()
    return f"@@{hashlib.blake2b(whole, digest_size=12).hexdigest()}-{index}@@"


def normalize_messages(messages: Sequence[Any]) -> list[Message]:
    """The messages as templates want them: known roles, one text each, tool arguments as objects.

    Raises ValueError that names the first message which is not so.
    """
    if not messages:
        raise ValueError("messages is empty; expected at least 1 message.")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {type(message).__name__}; expected an object.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{where}.role is {role!r}; expected one of {', '.join(ROLES)}.")
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise ValueError(f"{where}.tool_calls stands on a {role} message; expected an assistant's.")
    extra = {key: message[key] for key in _TEMPLATE_KEYS if message.get(key)}
    if calls:
        extra["tool_calls"] = _tool_calls(calls, where)
    content = message.get("content")
    if content is None and not (role == "assistant" and calls):
        raise ValueError(f"{where}.content is missing; expected a string or a list of text parts.")
    return {"role": ROLES[role], "content": _text(content, f"{where}.content"), **extra}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise ValueError(
            f"{where} is {type(content).__name__}; expected a string or a list of text parts."
        )
    if any("\ud800" <= character <= "\udfff" for character in content):
        raise ValueError(f"{where} holds half of a surrogate pair; expected valid Unicode text.")
    return content


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"{where} is of type {kind!r}; expected a text part, the policy reads only text."
        )
    return _text(part["text"], where)


def _tool_calls(calls: Any, where: str) -> list[Message]:
    """The calls with arguments as objects, because templates print them as JSON themselves."""
    normalized = []
    for call in calls if isinstance(calls, list) else [{}]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{where}.tool_calls is malformed; expected a list of named function calls."
            )
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(
                    f"{where}.tool_calls has arguments that are no JSON ({error}); expected JSON."
                ) from error
        normalized.append(call | {"function": function | {"arguments": arguments}})
    return normalized
