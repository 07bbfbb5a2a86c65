"""Ways to write a conversation for a chat template that lacks roles, tools or several calls."""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, Literal

from lightning_jax.gateway.prompt.tool_formats import THOUGHT_MARKS, ToolFormat
from lightning_jax.types import Message

Tools = Sequence[Mapping[str, Any]] | None
_ID_LENGTH = 9  # of a call's id, for templates that refuse every other length


@dataclass(frozen=True)
class Writing:
    """Form in which a chat template gets messages. The defaults give them as they are.

    `system` "first" writes later system messages as the user's, and "user" all of them. `offers`
    of tools are given to the template, in the system message's field `tools`, or as text. `calls`
    have their arguments as objects, as JSON strings, or are part of the message's text. `results`
    of tools have a role of their own or are the user's.
    """

    system: Literal["role", "first", "user"] = "role"
    offers: Literal["template", "system", "text"] = "template"
    calls: Literal["objects", "strings", "text"] = "objects"
    results: Literal["tool", "user"] = "tool"
    one_call: bool = False  # a message for each call, followed by its result
    short_ids: bool = False  # ids of calls have 9 letters and digits
    merged: bool = False  # the user's neighbouring messages are one


AS_IT_IS = Writing()
PLAINEST = Writing("user", "text", "text", "user", one_call=True, short_ids=True, merged=True)


def alternatives(writing: Writing) -> Iterator[Writing]:
    """Yield other ways to write, the most alike first: one change each, then all changes."""
    changes: list[dict[str, Any]] = [
        {"system": "first"},
        {"merged": True},
        {"calls": "strings"},
        {"one_call": True},
        {"short_ids": True},
        {"calls": "text"},
        {"results": "user"},
        {"offers": "text", "calls": "text"},
        {"system": "user"},
        {field.name: getattr(PLAINEST, field.name) for field in fields(PLAINEST)},
    ]
    tried = {writing}
    for change in changes:
        other = replace(writing, **change)
        if other not in tried:
            tried.add(other)
            yield other


def arrange_messages(
    messages: Sequence[Message], tools: Tools, form: ToolFormat, writing: Writing
) -> tuple[list[Message], Tools]:
    """Return the messages and the tools to give to the template. The input is not changed."""
    turns = list(messages)
    if writing.one_call:
        turns = _split_calls(turns)
    if writing.short_ids:
        turns = [_with_short_ids(message) for message in turns]
    if writing.calls == "text":
        turns = [_calls_as_text(message, form) for message in turns]
    elif writing.calls == "strings":
        turns = [_arguments_as_text(message) for message in turns]
    if writing.results == "user":
        turns = list(_results_of_the_user(turns))
    if tools and writing.offers != "template":
        turns = _with_offer(turns, tools, form, writing)
    if writing.system != "role":
        turns = _without_system(turns, keep_first=writing.system == "first")
    if writing.merged:
        turns = _merged(turns)
    return turns, tools if writing.offers == "template" else None


def _split_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each of several calls in one of its own, before its result."""
    turns, results = [], list(messages)
    while results:
        message = results.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            turns.append(message)
            continue
        count = next((i for i, m in enumerate(results) if m["role"] != "tool"), len(results))
        answers, results = results[:count], results[count:]
        for index, call in enumerate(calls):
            turns.append(message | {"tool_calls": [call]})
            message = {"role": "assistant", "content": ""}
            matching = [a for a in answers if a.get("tool_call_id") == call.get("id")]
            for answer in matching or answers[: index < len(answers)]:
                turns.append(answer)
                answers.remove(answer)
        turns += answers
    return turns


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [call | {"id": _short(call.get("id"))} for call in calls]
    if message["role"] == "tool":
        changed["tool_call_id"] = _short(message.get("tool_call_id"))
    return changed


def _short(call_id: Any) -> str:
    text = str(call_id or "")
    if len(text) == _ID_LENGTH and text.isalnum():
        return text
    return hashlib.blake2b(text.encode(), digest_size=_ID_LENGTH).hexdigest()[:_ID_LENGTH]


def _calls_as_text(message: Message, form: ToolFormat) -> Message:
    plain = {k: message[k] for k in ("role", "content", "reasoning_content") if k in message}
    if calls := message.get("tool_calls"):
        pairs = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        plain["content"] = f"{message['content']}{form.write(pairs)}"
    return plain


def _arguments_as_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    return message | {
        "tool_calls": [
            call | {"function": function | {"arguments": text}}
            for call, function, text in zip(calls, functions, texts, strict=True)
        ]
    }


def _results_of_the_user(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, with neighbouring results of tools as one message of the user."""
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = [f"<tool_response>\n{m['content']}\n</tool_response>" for m in group]
            yield {"role": "user", "content": "\n".join(results)}
        else:
            yield from group


def _with_offer(
    messages: list[Message], tools: Sequence[Any], form: ToolFormat, writing: Writing
) -> list[Message]:
    """Return the messages with the tools in the first system message, which is added if needed."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    first = messages[0] if has_system else {"role": "system", "content": ""}
    if writing.offers == "system":
        functions = [tool["function"] for tool in tools]
        offer = first | {"tools": json.dumps(functions, ensure_ascii=False)}
    else:
        offer = first | {"content": _joined(first["content"], form.instructions(tools))}
    return [offer, *messages[has_system:]]


def _without_system(messages: Sequence[Message], keep_first: bool) -> list[Message]:
    """Return the messages with system messages written as the user's.

    Those at the beginning are joined and, unless they are kept, put before the user's first text.
    """
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    text = _joined(*(message["content"] for message in messages[:count]))
    rest = [m | {"role": "user"} if m["role"] == "system" else m for m in messages[count:]]
    if not count:
        return rest
    if keep_first:
        return [{**messages[0], "content": text}, *rest]
    if rest and rest[0]["role"] == "user":
        return [rest[0] | {"content": _joined(text, rest[0]["content"])}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _merged(messages: Sequence[Message]) -> list[Message]:
    turns: list[Message] = []
    for is_user, group in groupby(messages, lambda message: message["role"] == "user"):
        same = list(group)
        text = _joined(*(message["content"] for message in same))
        turns += [same[0] | {"content": text}] if is_user else same
    return turns


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


# ---- What stands in the prompt -------------------------------------------------------------------


def dropped_parts(messages: Sequence[Message], tools: Tools, text: str) -> list[str]:
    """Return in words the parts of a conversation that are missing from its prompt.

    Templates may leave out the thoughts of old turns. Takes time linear in the text if the template
    keeps the order of the messages.
    """
    prompt, lost = _Reader(text), []
    for tool in tools or ():
        if not prompt.has(tool["function"]["name"]):
            lost.append(f"the offer of the tool {tool['function']['name']!r}")
    prompt.at = 0
    for index, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "assistant":
            content = without_thought(content)
        if not (prompt.has(content.strip()) or _has_without_switches(prompt, message)):
            lost.append(f"{_OWNERS[message['role']]} text (messages[{index}])")
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not all(map(prompt.has, (name, *_leaves(arguments)))):
                lost.append(f"the call of {name!r} (messages[{index}])")
    return lost


# Words in a system message that a template may read and remove, as SmolLM3's does.
_SWITCHES = re.compile(r"(?<!\S)/(?:think|no_think|system_override)(?!\S)")


def _has_without_switches(prompt: "_Reader", message: Message) -> bool:
    is_switched = message["role"] == "system" and _SWITCHES.search(message["content"])
    return bool(is_switched) and prompt.has(_SWITCHES.sub("", message["content"]).strip())


_OWNERS = {
    "system": "the system message's",
    "user": "the user's",
    "assistant": "the assistant's",
    "tool": "the tool result's",
}


def without_thought(text: str) -> str:
    """Return the text after the last mark that closes a thought."""
    marks = (end for _, end in THOUGHT_MARKS)
    ends = [at + len(mark) for mark in marks if (at := text.rfind(mark)) >= 0]
    return text[max(ends, default=0) :]


class _Reader:
    """Search for texts in a prompt, from the last one found on and then from its beginning."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def has(self, part: str) -> bool:
        """Return True if the text stands in the prompt, as it is or as in JSON or Python.

        Its blanks may be others, because templates trim and indent.
        """
        if not part or self._has(part) or any(map(self._has, _other_spellings(part))):
            return True
        return "".join(part.split()) in self._without_blanks

    @functools.cached_property
    def _without_blanks(self) -> str:
        return "".join(self.text.split())

    def _has(self, part: str) -> bool:
        at = self.text.find(part, self.at)
        if at < 0:
            at = self.text.find(part)
        self.at = self.at if at < 0 else at
        return at >= 0


def _other_spellings(text: str) -> Iterator[str]:
    for ascii_only in (False, True):
        yield json.dumps(text, ensure_ascii=ascii_only)[1:-1]
    yield repr(text)[1:-1]


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in a call's arguments."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value.strip()
