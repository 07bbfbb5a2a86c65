"""Rendering of messages to prompt ids that reuses the ids the policy sampled.

A response that returns in a later prompt must not be encoded again. The same text has many
encodings, so training would see a token path that was never sampled. Two mechanisms prevent this.

A conversation continues a recorded call if it begins with that call's messages and its response.
Its prompt then begins with the call's prompt and response ids, unchanged. The template only adds
what follows. So the next prompt extends the last one by construction. This holds whatever the
template writes (dates, think blocks it drops, generation prompts it does not repeat).

Other responses are spliced. The template renders a mark in place of each one, the pieces between
marks are encoded, and the recorded ids go in between:

    text     <start>user hi<end><start>assistant   MARK     <end><start>user more...
    ids      [1 5 6 2 1 8]                         [40 2]   [2 1 5 9 ...]
    prompt   [1 5 6 2 1 8 40 2 1 5 9 ...]          the end-of-turn token 2 is kept once
"""

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.engine.generation import PromptTooLong
from lightning_jax.gateway.prompt.habits import template_text
from lightning_jax.gateway.prompt.messages import normalize_message, normalize_messages
from lightning_jax.gateway.prompt.shield import Shield
from lightning_jax.gateway.prompt.tool_formats import ToolFormat, format_of
from lightning_jax.gateway.prompt.writing import Tools, without_thought
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.types import Message

_MAX_BLANKS = 4  # tokens between a response and the end of its turn
_INDEX = re.compile("([0-9]+)@@")  # of a replayed message, after the mark


@dataclass(frozen=True)
class Rendered:
    """Rendered prompt, with the number of replayed responses and breaks."""

    token_ids: tuple[int, ...]
    replayed: int  # messages rendered with their sampled ids
    breaks: int  # 1 if the last replayed response's path is not a prefix of this prompt, else 0
    history: str = ""  # digest of the messages, the tools and the template's variables
    path: str = ""  # digest of the token ids


@dataclass(frozen=True)
class Generated:
    """One sampled response to a rendered prompt."""

    prompt: Rendered
    token_ids: tuple[int, ...]


@dataclass
class Recalled:
    """Responses that became the same message, by history and by path.

    If several have the same history or the same prompt, only the newest counts.
    """

    newest: Generated
    by_history: dict[str, Generated] = field(default_factory=dict)
    by_path: dict[str, Generated] = field(default_factory=dict)

    def add(self, generated: Generated) -> None:
        """Add a response as the newest."""
        prompt = generated.prompt
        self.newest = self.by_history[prompt.history] = self.by_path[prompt.path] = generated


class ConversationMemory:
    """Responses that the policy generated in one rollout, by the message the agent received."""

    def __init__(self) -> None:
        self._generated: dict[str, Recalled] = {}
        self._keys_by_call: dict[str, str] = {}  # keys of `_generated` by the ids of their calls
        self._answered: set[str] = set()

    def add(self, message: Message, generated: Generated) -> None:
        """Remember a response by its message, unless it has no content to recognize.

        Recognize its calls without their ids too, because some dialects send none.
        """
        plain = normalize_message(message, "response")
        if _fingerprint(plain):
            self._answered.add(generated.prompt.history)
        keys = {_fingerprint(plain), _fingerprint(_without_call_ids(plain))}
        self._keys_by_call |= dict.fromkeys(_call_ids(plain), _fingerprint(plain))
        for key in keys if generated.token_ids else ():
            if key:
                self._generated.setdefault(key, Recalled(generated)).add(generated)

    def recall(self, message: Message) -> Recalled | None:
        """Return the responses that became this message, or None if there are none.

        Clients add the defaults of arguments to a call. With the ids of a response's calls, only
        the arguments that were sampled count.
        """
        if exact := self._generated.get(_fingerprint(message)):
            return exact
        key = next((self._keys_by_call[id] for id in _call_ids(message) if self.sent(id)), None)
        if key is None or _fingerprint(_with_arguments_of(key, message)) != key:
            return None
        return self._generated.get(key)

    def sent(self, call_id: str) -> bool:
        """Return True if the agent received a call with this id."""
        return call_id in self._keys_by_call

    def answered(self, history: str) -> bool:
        """Return True if the policy answered the conversation with this digest."""
        return history in self._answered


def _fingerprint(message: Message) -> str:
    """Return a key from a message's text and its calls' ids and arguments, or "" if it has neither.

    Ignore a thought before the text and the blanks around it, because frameworks cut them off.
    """
    whole, calls = message.get("content") or "", message.get("tool_calls") or ()
    text = without_thought(whole).strip() or whole.strip()
    if not calls:
        return (text or whole) and "text:" + text
    functions = [call["function"] for call in calls]
    parts = [
        [call.get("id"), _one_spelling((function["name"], function["arguments"] or {}))]
        for call, function in zip(calls, functions, strict=True)
    ]
    return "calls:" + json.dumps([text, parts], sort_keys=True)


def _one_spelling(value: Any) -> Any:
    """Return arguments with whole floats as integers, because JavaScript clients send 1.0 back as
    1.
    """
    if isinstance(value, dict):
        return {key: _one_spelling(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_one_spelling(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _call_ids(message: Message) -> list[str]:
    ids = (call.get("id") for call in message.get("tool_calls") or ())
    return [id for id in ids if id and isinstance(id, str)]


def _with_arguments_of(key: str, message: Message) -> Message:
    """Return the message with those arguments of its calls that the calls of a fingerprint have."""
    _, parts = json.loads(key.removeprefix("calls:"))
    calls = []
    for call, (_, (_, sampled)) in zip(message["tool_calls"], parts, strict=False):
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(sampled, dict) and isinstance(arguments, dict):
            arguments = {name: item for name, item in arguments.items() if name in sampled}
        calls.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": calls + message["tool_calls"][len(calls) :]}


def _without_call_ids(message: Message) -> Message:
    calls = message.get("tool_calls")
    return message | {"tool_calls": [c | {"id": None} for c in calls]} if calls else message


def render_prompt(
    messages: Sequence[Any],
    tools: Tools,
    tokenizer: Tokenizer,
    memory: ConversationMemory | None = None,
    form: ToolFormat | None = None,
    max_len: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Rendered:
    """Return the prompt ids of a conversation, up to the assistant's next turn.

    `memory` is not changed. The time is linear in the conversation's length. `kwargs` are other
    variables for the chat template. A call with other ones is not continued, because the template
    may have written its whole prompt differently.

    Raise ValueError if messages are malformed or the chat template cannot show them. Raise
    PromptTooLong, without encoding it, if the text is too long for a slot of `max_len` tokens.
    """
    plain = normalize_messages(messages)
    digests = _digests(plain, tools, kwargs)
    replies = {
        index: reply
        for index, message in enumerate(plain)
        if memory and message["role"] == "assistant" and (reply := memory.recall(message))
    }
    form = form or format_of(tokenizer)
    # No text in the prompt contains these marks, because they have a hash of everything in it.
    shield = Shield(f"@@{digests[-1]}+", tokenizer, form)
    turns, offers = shield.messages(plain), shield.tools(tools)

    def write(messages: Sequence[Message]) -> str:
        return template_text(messages, offers, tokenizer, form, kwargs)

    pieces, marked = _pieces(turns, write, tuple(replies), f"@@{digests[-1]}-")
    base = _resumed(replies, digests)
    if base is None or base[0] not in marked:  # or the template drops that message
        start, recorded = 0, None
    else:  # its prompt covers everything before it
        start, recorded = marked.index(base[0]), base[1]
    rest = pieces[start + (recorded is not None) :]
    check_length([shield.restored(piece) for piece in rest], tokenizer, max_len)
    candidates = [replies[index] for index in marked[start:]]
    path, extends = _splice(pieces[start:], candidates, recorded, shield.encode, tokenizer)
    replayed = set(marked) | {index for index in replies if base and recorded and index < base[0]}
    # A response that comes back as another text starts a new path, as one that is dropped does.
    edited = memory is not None and any(
        message["role"] == "assistant"
        and _fingerprint(message)
        and (memory.answered(digest) or any(map(memory.sent, _call_ids(message))))
        for index, (message, digest) in enumerate(zip(plain, digests, strict=False))
        if index not in replies
    )
    whole = extends and not edited and len(replayed) == len(replies)
    return Rendered(tuple(path.ids), len(replayed), int(not whole), digests[-1], path.digest)


def check_length(pieces: Sequence[str], tokenizer: Tokenizer, max_len: int | None) -> None:
    """Raise PromptTooLong if the texts have more bytes than the longest tokens that may fit."""
    longest = tokenizer.max_token_bytes
    if longest is None or max_len is None:
        return
    num_bytes = sum(len(piece) for piece in pieces)  # characters, a lower bound for bytes
    if (fewest := -(-num_bytes // longest)) >= max_len:
        raise PromptTooLong(fewest, max_len, at_least=True)


def _digests(
    messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any] | None
) -> list[str]:
    """Return digests of what is not a message and the first n messages, for n from 0 to all."""
    others = json.dumps([tools or None, kwargs or None], sort_keys=True)
    digest = hashlib.blake2b(others.encode(), digest_size=12)
    digests = [digest.hexdigest()]
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode())
        digests.append(digest.hexdigest())
    return digests


def _resumed(
    replies: Mapping[int, Recalled], digests: Sequence[str]
) -> tuple[int, Generated] | None:
    """Return the latest recorded call that this conversation continues.

    It comes after the index of its response in the conversation.
    """
    for index in sorted(replies, reverse=True):
        if generated := replies[index].by_history.get(digests[index]):
            return index, generated
    return None


def _pieces(
    messages: list[Message],
    write: Callable[[Sequence[Message]], str],
    replayed: tuple[int, ...],
    mark: str,
) -> tuple[list[str], list[int]]:
    """Return the rendered text cut at the replayed messages, and the indices of those messages.

    A template may drop or rewrite a message, so that its mark is not found. Then the template gets
    the message's own text.
    """
    indices = set(replayed)
    marked = [
        {"role": message["role"], "content": f"{mark}{index}@@"} if index in indices else message
        for index, message in enumerate(messages)
    ]
    text = write(marked)
    marks = list(_marks(text, mark))
    counts = Counter(int(match[1]) for match in marks)
    if not all(counts[index] == 1 for index in replayed):
        once = tuple(index for index in replayed if counts[index] == 1)
        return _pieces(messages, write, once, mark)
    starts = [0, *(match.end() for match in marks)]
    ends = [*(match.start() - len(mark) for match in marks), len(text)]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return pieces, [int(match[1]) for match in marks]


def _marks(text: str, mark: str) -> Iterator[re.Match[str]]:
    """Yield a match of the index after each mark. Compiling a pattern of the mark takes longer."""
    at = text.find(mark)
    while at >= 0:
        if match := _INDEX.match(text, at + len(mark)):
            yield match
        at = text.find(mark, match.end() if match else at + 1)


class _Path:
    """Growing list of token ids, with its digest at any length."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.ids: list[int] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self.extend(ids)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def extend(self, ids: Iterable[int]) -> None:
        more = array("q", ids)
        self.ids.extend(more)
        self._hash.update(more)


def _splice(
    pieces: Sequence[str],
    candidates: Sequence[Recalled],
    base: Generated | None,
    encode: Callable[[str], list[int]],
    tokenizer: Tokenizer,
) -> tuple[_Path, bool]:
    """Return the pieces' ids with the recorded ids between them, and whether the path was kept.

    It was not kept if the last recorded response was sampled after other ids. If there is a base,
    its prompt replaces the first piece.
    """
    path = _Path(encode(pieces[0]) if base is None else base.prompt.token_ids)
    extends = True
    for index, (candidate, piece) in enumerate(zip(candidates, pieces[1:], strict=True)):
        # The same text may have been sampled as different ids. Prefer those sampled on this path.
        here = base if base and index == 0 else candidate.by_path.get(path.digest)
        chosen, extends = here or candidate.newest, here is not None
        path.extend(chosen.token_ids)
        path.extend(_tail(chosen.token_ids[-1], encode(piece), tokenizer))
    return path, extends


def _tail(last: int, ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids that follow a response whose last id is `last`, with one end of turn.

    Templates write the end of a turn after the response, which already has the sampled one. Some
    write blanks before it.
    """
    if last not in tokenizer.eos_ids:
        return ids
    for count, token_id in enumerate(ids[: _MAX_BLANKS + 1]):
        if token_id in (last, tokenizer.template_end_id):
            return ids[count + 1 :]
        if tokenizer.decode([token_id], skip_special=False).strip():
            break
    return ids
