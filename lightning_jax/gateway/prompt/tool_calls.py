"""Parser from sampled text to tool calls, piece by piece as it streams.

    text <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    TextPiece("text "), CallStart(0, "f"), CallArguments(0, '{"a": 1}')

Text that may become a call is held until the call is complete, because text that was sent to a
client cannot be withdrawn. So a malformed call comes out as plain text. If a grammar guarantees the
call, its arguments are sent as they are generated.

However the text is split, the pieces are the same. Joined they are the whole text but for the marks
of calls, blanks between two calls and blanks after the last one.

A call inside a thought (`<think>...</think>`) is text, because the model only considers it. A
thought begins with its mark at the start of a line, or in the prompt. One that is not closed lasts
until the end of the answer.

Some models of a family write objects, or a list of them, without marks or in a fenced block
(Qwen2.5-Coder). An answer that is nothing else but thoughts, with the names of offered tools, is
calls as well.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lightning_jax.gateway.prompt.call_syntax import JsonStrings, ObjectScanner, parse_calls
from lightning_jax.gateway.prompt.tool_formats import THOUGHT_MARKS, ToolFormat


@dataclass(frozen=True)
class TextPiece:
    text: str


@dataclass(frozen=True)
class CallStart:
    """Start of the next call in an answer."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = TextPiece | CallStart | CallArguments


class PlainText:
    """Parser for a request without tools. Everything is text."""

    malformed = 0

    def push(self, text: str) -> list[Piece]:
        return [TextPiece(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class ToolCallParser:
    """Parser that splits one answer into text and calls.

    `guaranteed` means that a grammar constrained the answer. Calls of tools that are not in
    `allowed` (None: all are) and calls beyond `at_most` come out as text and count as malformed.
    `thought_end` is the closing mark of a thought that the prompt began. Without `unmarked`, JSON
    without the format's marks is an answer.
    """

    def __init__(
        self,
        form: ToolFormat,
        *,
        guaranteed: bool = False,
        offered: Collection[str] | None = None,
        allowed: Collection[str] | None = None,
        at_most: int | None = None,
        thought_end: str = "",
        unmarked: bool = True,
    ) -> None:
        self._form, self._offered = form, offered
        self._allowed, self._at_most = allowed, at_most
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._guaranteed = guaranteed
        self._reads_unmarked = unmarked and bool(self._begin and offered) and not guaranteed
        self._longest = max(map(len, (self._begin, *dict(THOUGHT_MARKS))))
        self._marks = {} if guaranteed else dict(THOUGHT_MARKS)
        self._thought_end = "" if guaranteed else thought_end  # "" outside of thoughts
        self._held = ""
        self._sought = 0  # no mark that is looked for begins earlier in the held text
        self._strings = JsonStrings()  # of the held call
        self._inside = False  # the held text follows an opening mark
        self._lead = ""  # that mark, and blanks before it that were not emitted
        self._text_seen = False  # text other than blanks and thoughts was emitted
        self._line_starts = True  # only blanks were emitted since the line or the answer began
        self._after_call = False  # nothing was emitted since the last call
        self._count = 0
        self._stream: ObjectScanner | None = None
        self.malformed = 0

    def push(self, text: str) -> list[Piece]:
        """Add text, and return the pieces that are now certain."""
        self._held += text
        return list(self._advance())

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text."""
        pieces: list[Piece] = []
        while self._held or self._inside:
            pieces += [*self._settle(), *self._advance()]
        return pieces

    def _settle(self) -> Iterator[Piece]:
        """Decide about held text that no more text follows, at least about its beginning."""
        text, self._held, inside, self._inside = self._held, "", self._inside, False
        self._sought = 0
        if self._stream:
            yield from self._arguments(self._stream.push(text)[0])
        elif self._guaranteed:
            if self._begin.startswith(text) or self._end.startswith(_TAIL.sub("", text)):
                return  # part of the marks
            yield from self._text(self._lead + text)
        elif inside:  # the closing mark is missing, or stands in what looks like a string
            at = text.find(self._end) if self._end else -1
            if at < 0 or parse_calls(text, self._form):
                yield from self._calls_or_text(text, self._lead + text)
            else:
                self._held = text
                yield from self._close(at)
        elif self._thought_end:
            yield TextPiece(text)
        elif self._is_bare(text):
            yield from self._calls_or_text(text, text)
        elif self._may_be_unmarked(text):
            yield from self._unmarked(text)
        elif text.strip() or not self._after_call:
            yield from self._text(text)

    def _advance(self) -> Iterator[Piece]:
        while self._held:
            before = (len(self._held), self._inside, self._thought_end)
            if self._thought_end:
                yield from self._advance_thought()
            elif self._guaranteed and (self._inside or not self._begin):
                yield from self._advance_stream()
            elif self._inside:
                yield from self._advance_inside()
            else:
                yield from self._advance_outside()
            if before == (len(self._held), self._inside, self._thought_end):
                return

    def _text(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        self._text_seen = self._text_seen or bool(text.strip())
        _, is_broken, line = text.rpartition("\n")
        self._line_starts = bool(is_broken or self._line_starts) and not line.strip()
        self._after_call = False
        yield TextPiece(text)

    def _advance_thought(self) -> Iterator[Piece]:
        """Emit a thought up to its end, or up to the possible start of its closing mark."""
        text, mark = self._held, self._thought_end
        at = text.find(mark)
        end = at + len(mark) if at >= 0 else len(text) - _overlap(text, mark)
        if end:
            yield TextPiece(text[:end])
        self._held = text[end:]
        if at >= 0:
            self._thought_end, self._line_starts, self._after_call = "", True, False

    def _advance_outside(self) -> Iterator[Piece]:
        """Emit text up to an opening mark, or up to the possible start of one."""
        text = self._held
        if self._is_bare(text):
            return
        at, mark = self._opening()
        if mark in self._marks:
            yield from self._text(text[:at])
            self._thought_end, self._held, self._sought = self._marks[mark], text[at:], 0
        elif mark:
            is_markup = self._after_call and not text[:at].strip()
            self._lead, self._strings = text[: at + len(mark)] if is_markup else mark, JsonStrings()
            if not is_markup:
                yield from self._text(text[:at])
            self._held, self._inside, self._sought = text[at + len(mark) :], True, 0
        elif self._may_be_unmarked(text):
            self._sought = max(0, len(text) - self._longest)
        else:
            self._sought = 0
            end = len(text) - max(_overlap(text, mark) for mark in (self._begin, *self._marks))
            if text[:end].strip() or not self._after_call:  # blanks may be markup
                self._held = text[end:]
                yield from self._text(text[:end])

    def _opening(self) -> tuple[int, str]:
        """Return the place and text of the first opening mark. The text is "" without one."""
        openings = [(at, mark) for mark in self._marks if (at := self._thought_at(mark)) >= 0]
        if self._begin and (at := self._held.find(self._begin, self._sought)) >= 0:
            openings.append((at, self._begin))
        return min(openings, default=(0, ""))

    def _thought_at(self, mark: str) -> int:
        """Return where the mark first stands at the start of a line, or -1."""
        text, at = self._held, self._held.find(mark, self._sought)
        while at >= 0:
            _, is_broken, line = text[:at].rpartition("\n")
            if (is_broken or self._line_starts) and not line.strip():
                return at
            at = text.find(mark, at + 1)
        return -1

    def _advance_inside(self) -> Iterator[Piece]:
        """Read a call once its closing mark is there. A mark inside a string is part of it."""
        if not self._end:
            return
        at = self._held.find(self._end, self._sought)
        while at >= 0 and self._strings.contain(self._held, at):
            at = self._held.find(self._end, at + len(self._end))
        if at >= 0:
            yield from self._close(at)
        else:
            self._sought = max(0, len(self._held) - len(self._end) + 1)

    def _close(self, at: int) -> Iterator[Piece]:
        """Read the held call, which ends at `at`. If it is malformed, its first mark ends it."""
        self._inside, self._sought = False, 0
        if not parse_calls(self._held[:at], self._form):
            at = self._held.find(self._end)
        body, self._held = self._held[:at], self._held[at + len(self._end) :]
        yield from self._calls_or_text(body, f"{self._lead}{body}{self._end}")

    def _advance_stream(self) -> Iterator[Piece]:
        """Emit a guaranteed call: its name once it is known, then its arguments as they arrive."""
        if self._stream is None:
            head = _HEAD.match(self._held)
            if head is None:
                self._skip_tail()
                return
            yield CallStart(self._count, json.loads(head[1]))
            self._stream = ObjectScanner()
            self._count += 1
            self._held, self._lead = self._held[head.end() :], ""
        arguments, self._held = self._stream.push(self._held)
        yield from self._arguments(arguments)
        if self._stream.done:
            self._stream, self._after_call = None, True

    def _arguments(self, text: str) -> Iterator[Piece]:
        if text:
            yield CallArguments(self._count - 1, text)

    def _skip_tail(self) -> None:
        """Skip the closing mark of a guaranteed call, or of a list of them."""
        if self._end and (at := self._held.find(self._end)) >= 0:
            self._held = self._held[at + len(self._end) :]
            self._inside = False

    def _is_bare(self, text: str) -> bool:
        """Return True if the answer so far may be calls in a format without marks.

        In such a format a whole answer is either calls or text, but for its thoughts.
        """
        if self._begin or self._text_seen:
            return False
        begun = text.lstrip()
        return not begun or any(
            begun.startswith(start) or start.startswith(begun) for start in self._form.starts
        )

    def _may_be_unmarked(self, text: str) -> bool:
        """Return True if the answer so far may be calls of offered tools without their marks."""
        is_first = not (self._text_seen or self._count)
        return self._reads_unmarked and is_first and bool(_UNMARKED.fullmatch(text))

    def _unmarked(self, text: str) -> Iterator[Piece]:
        """Emit the calls of a whole answer, or all of it as text."""
        calls = parse_calls(_without_fence(text), self._form, needs_arguments=True)
        if not calls or not self._knows(calls):
            yield from self._text(text)
        else:
            yield from self._calls_or_text(_without_fence(text), text)

    def _calls_or_text(self, body: str, as_text: str) -> Iterator[Piece]:
        calls = parse_calls(body, self._form)
        # Without marks, an object with a name may be an answer.
        is_known = bool(self._begin) or self._knows(calls)
        if not (calls and is_known and self._may(calls)):
            if is_known and (calls or self._begin or '"name"' in body):
                self.malformed += 1
            yield from self._text(as_text)
            return
        for name, arguments in calls:
            yield CallStart(self._count, name)
            yield CallArguments(self._count, arguments)
            self._count += 1
        self._after_call = self._line_starts = True

    def _knows(self, calls: Sequence[tuple[str, str]]) -> bool:
        return self._offered is None or all(name in self._offered for name, _ in calls)

    def _may(self, calls: Sequence[tuple[str, str]]) -> bool:
        if self._at_most is not None and self._count + len(calls) > self._at_most:
            return False
        return self._allowed is None or all(name in self._allowed for name, _ in calls)


_TAIL = re.compile(r"^[\s,;\]]+")  # of a guaranteed call, before its closing mark


# Start of an answer that may be calls alone: JSON objects or a list, also in a fenced block.
_OBJECTS = r"(?:\[\s*)?\{.*|\[\s*"
_UNMARKED = re.compile(
    rf"\s*(?:`{{0,3}}|```(?:j|js|jso|json)?\s*(?:{_OBJECTS})?|{_OBJECTS})", re.DOTALL
)
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


def _without_fence(text: str) -> str:
    fence = _FENCED.fullmatch(text)
    return fence[1] if fence else text


# Start of a call as grammars write it, with the name first.
_HEAD = re.compile(
    r'[\s,;\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `mark`, but not all of
    it.
    """
    if mark[:1] not in text[-len(mark) :]:
        return 0  # quickly, because most text has no mark
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)
