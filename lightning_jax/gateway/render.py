"""Messages to prompt ids: what the policy generated comes back as the very ids it sampled.

A response that returns in a later prompt must not be encoded again: the same text has many
encodings, and training would then see another token path than the one sampled. Two things see
to it.

A conversation that goes on from a recorded call, that is, begins with the messages of that call
and its response, begins with that call's ids, prompt and response, as they are. The template only
adds what follows. So the next prompt extends the last one by construction, whatever the template
writes (dates, think blocks it drops, generation prompts it does not repeat).

Other responses are spliced: the template renders a mark in their place, the pieces between marks
are encoded, and the recorded ids go between them:

    text     <start>user hi<end><start>assistant   MARK     <end><start>user more...
    ids      [1 5 6 2 1 8]                         [40 2]   [2 1 5 9 ...]
    prompt   [1 5 6 2 1 8 40 2 1 5 9 ...]          the end-of-turn token 2 is kept once
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.gateway.tool_calls import read_arguments
from lightning_jax.gateway.tool_formats import ToolFormat, format_of
from lightning_jax.models.chat_template import TemplateError
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
Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Generated:
    """One response as it was sampled: what the policy had read, and the ids it gave.

    `history` is the digest of the messages and tools it answered (`Rendered.history`).
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    history: str = ""


class ConversationMemory:
    """What the policy generated in one rollout, by what the agent was given."""

    def __init__(self) -> None:
        self._generated: dict[str, list[Generated]] = {}

    def add(self, message: Message, generated: Generated) -> None:
        """Remembers a response by the message it became, unless that has nothing to recognise.

        Its calls are recognised without their ids too, because some dialects send none.
        """
        plain = _normalize(message, "response")
        keys = {_fingerprint(plain), _fingerprint(_without_call_ids(plain))}
        for key in keys if generated.token_ids else ():
            if key:
                self._generated.setdefault(key, []).append(generated)

    def recall(self, message: Message) -> tuple[Generated, ...]:
        """The responses that became this message, newest first."""
        return tuple(reversed(self._generated.get(_fingerprint(message), ())))


def _fingerprint(message: Message) -> str:
    """What tells responses apart: text, and the ids and arguments of calls. "" if it has neither.

    The blanks around the text of a message with calls do not count: frameworks trim them.
    """
    text, calls = message.get("content") or "", message.get("tool_calls") or ()
    if not calls:
        return text and "text:" + text
    parts = [[call.get("id"), _one_spelling(_plain_call(call))] for call in calls]
    return "calls:" + json.dumps([text.strip(), parts], sort_keys=True)


def _one_spelling(value: Any) -> Any:
    """Arguments as every client sends them back: JavaScript's know no difference of 1.0 and 1."""
    if isinstance(value, dict):
        return {key: _one_spelling(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_one_spelling(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_call_ids(message: Message) -> Message:
    calls = message.get("tool_calls")
    return message | {"tool_calls": [c | {"id": None} for c in calls]} if calls else message


def _plain_call(call: Mapping[str, Any]) -> tuple[str, Any]:
    function = call["function"]
    return function["name"], function["arguments"] or {}


@dataclass(frozen=True)
class Rendered:
    """A prompt, and how the responses that it replays came out."""

    token_ids: tuple[int, ...]
    replayed: int  # messages rendered with the ids that were sampled
    breaks: int  # 1 if the last replayed response's path is not a prefix of this prompt, else 0
    history: str = ""  # digest of the messages and tools


def render(
    messages: Sequence[Any],
    tools: Tools,
    tokenizer: Tokenizer,
    memory: ConversationMemory | None = None,
    form: ToolFormat | None = None,
) -> Rendered:
    """The prompt ids of a conversation, up to the assistant's next turn; `memory` stays as it is.

    Raises ValueError for messages that are malformed or that the chat template cannot show.
    """
    plain = normalize_messages(messages)
    digests = _digests(plain, tools)
    known = {
        index: found
        for index, message in enumerate(plain)
        if memory and message["role"] == "assistant" and (found := memory.recall(message))
    }
    view = _View(tokenizer, tools, form or format_of(tokenizer))
    pieces, marked = _pieces(plain, view, tuple(known))
    base = _resumed(known, digests)
    if base is None or base[0] not in marked:  # or the template hides that message
        start, recorded = 0, None
    else:  # what comes before it is in its prompt
        start, recorded = marked.index(base[0]), base[1]
    candidates = [known[index] for index in marked[start:]]
    ids, extends = _splice(pieces[start:], candidates, recorded, tokenizer)
    replayed = set(marked) | {index for index in known if base and recorded and index < base[0]}
    whole = extends and len(replayed) == len(known)
    return Rendered(tuple(ids), len(replayed), int(not whole), digests[-1])


@dataclass(frozen=True)
class _View:
    """How messages become text."""

    tokenizer: Tokenizer
    tools: Tools
    form: ToolFormat

    def text(self, messages: Sequence[Message]) -> str:
        """The template's text. What the template has no place for is written into the messages."""
        if not self.tokenizer.supports_tools:
            return self.tokenizer.render_chat(_without_tools(messages, self.tools, self.form))
        text = self.tokenizer.render_chat(messages, tools=self.tools)
        names = [c["function"]["name"] for m in messages for c in m.get("tool_calls", ())]
        if any(name not in text for name in names):
            raise TemplateError(
                "the chat template does not show the assistant's tool calls "
                f"({', '.join(sorted(set(names)))}); expected one that does. Send tools as well."
            )
        return text


def _without_tools(messages: Sequence[Message], tools: Tools, form: ToolFormat) -> list[Message]:
    """The same conversation for a template that knows only roles and text."""
    shown: list[Message] = []
    for message in messages:
        plain = {key: message[key] for key in ("role", "content")}
        if calls := message.get("tool_calls"):
            written = form.write([_plain_call(call) for call in calls])
            plain["content"] = f"{message['content']}{written}"
        shown.append(plain)
    if not tools:
        return shown
    offer = form.instructions(tools)
    if shown and shown[0]["role"] == "system":
        first = shown[0] | {"content": f"{shown[0]['content']}\n\n{offer}"}
        return [first, *shown[1:]]
    return [{"role": "system", "content": offer}, *shown]


def _digests(messages: Sequence[Message], tools: Tools) -> list[str]:
    """For each number of first messages, a digest of those and of the tools."""
    digest = hashlib.blake2b(json.dumps(tools or None, sort_keys=True).encode(), digest_size=12)
    digests = [digest.hexdigest()]
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode())
        digests.append(digest.hexdigest())
    return digests


def _resumed(
    known: Mapping[int, Sequence[Generated]], digests: Sequence[str]
) -> tuple[int, Generated] | None:
    """The latest recorded call that this conversation goes on from, and where its response lies."""
    for index in sorted(known, reverse=True):
        for generated in known[index]:
            if generated.history == digests[index]:
                return index, generated
    return None


def _pieces(
    messages: list[Message], view: _View, replayed: tuple[int, ...]
) -> tuple[list[str], list[int]]:
    """The rendered text cut at the replayed messages, and which messages those are.

    A template may drop or rewrite a message; then its mark is not found, and the template gets the
    text itself.
    """
    marks = {index: _mark(messages, index) for index in replayed}
    marked = [
        {"role": message["role"], "content": marks[index]} if index in marks else message
        for index, message in enumerate(messages)
    ]
    text = view.text(marked)
    if not all(text.count(mark) == 1 for mark in marks.values()):
        found = tuple(index for index, mark in marks.items() if text.count(mark) == 1)
        return _pieces(messages, view, found)
    order = sorted(marks, key=lambda index: text.index(marks[index]))
    pieces = []
    for index in order:
        piece, _, text = text.partition(marks[index])
        pieces.append(piece)
    return [*pieces, text], order


def _splice(
    pieces: Sequence[str],
    candidates: Sequence[tuple[Generated, ...]],
    base: Generated | None,
    tokenizer: Tokenizer,
) -> tuple[list[int], bool]:
    """The pieces' ids with recorded ids between; False if the last record is not a prefix.

    With a base, its prompt stands in the place of the first piece.
    """
    ids = tokenizer.encode(pieces[0]) if base is None else list(base.prompt_ids)
    extends = True
    for place, (found, piece) in enumerate(zip(candidates, pieces[1:], strict=True)):
        # One text may have been sampled twice, as different ids: take those sampled right here.
        chosen = next((g for g in found if g.prompt_ids == tuple(ids)), found[0])
        if base is not None and place == 0:
            chosen = base
        extends = chosen.prompt_ids == tuple(ids)
        ids = _join([*ids, *chosen.token_ids], chosen.token_ids[-1], piece, tokenizer)
    return ids, extends


def _join(ids: list[int], last: int, piece: str, tokenizer: Tokenizer) -> list[int]:
    """The ids and those of the text that follows; an end of turn that both hold is there once."""
    tail = tokenizer.encode(piece)
    return ids + (tail[1:] if last in tokenizer.eos_ids and tail[:1] == [last] else tail)


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
        if isinstance(arguments, str):  # a call that the token limit cut is shown as it was
            arguments = read_arguments(arguments)
        plain = {"name": function["name"], "arguments": arguments}
        normalized.append({"id": call.get("id"), "type": "function", "function": plain})
    return normalized
