"""Parser from sampled text to tool calls, piece by piece as it streams.

    text <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    TextPiece("text "), CallStart(0, "f"), CallArguments(0, '{"a": 1}')

Text that may become a call is held until the call is complete, because text that was sent to a
client cannot be withdrawn. So a malformed call comes out as plain text. If a grammar guarantees the
call, its arguments are sent as they are generated.

Some models of a family write the object without its marks, or in a fenced block (Qwen2.5-Coder). An
answer that is nothing else, with the names of offered tools, is calls as well.
"""

import ast
import json
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.gateway.fields import has_more_values, is_deep
from lightning_jax.gateway.prompt.tool_formats import ToolFormat

MAX_VALUES = 50_000  # names and values in a call's arguments; longer arguments stay text


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
    """

    def __init__(
        self,
        form: ToolFormat,
        *,
        guaranteed: bool = False,
        offered: Collection[str] | None = None,
        allowed: Collection[str] | None = None,
        at_most: int | None = None,
    ) -> None:
        self._form, self._offered = form, offered
        self._allowed, self._at_most = allowed, at_most
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._guaranteed = guaranteed
        self._held = ""
        self._inside = False  # the held text follows an opening mark
        self._text_seen = False  # text other than blanks was emitted
        self._count = 0
        self._stream: _ArgumentsStream | None = None
        self.malformed = 0

    def push(self, text: str) -> list[Piece]:
        """Add text, and return the pieces that are now certain."""
        self._held += text
        return list(self._advance())

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text."""
        if self._stream:
            pieces, self._held = self._stream.push(self._held)[0], ""
            return pieces
        held, self._held = self._held, ""
        if self._guaranteed or not (held or self._inside):
            return []  # the end of a guaranteed call is not text
        if not self._begin and self._may_be_bare(held):
            return self._calls_or_text(held, held)
        if self._may_be_unmarked(held):
            return self._unmarked(held)
        if self._inside:  # the closing mark is missing, but the call may be complete
            return self._calls_or_text(held, self._begin + held)
        return [TextPiece(held)]

    def _advance(self) -> Iterator[Piece]:
        if not self._begin:
            yield from self._advance_bare()
            return
        while self._held:
            before = self._held
            yield from self._advance_inside() if self._inside else self._advance_outside()
            if self._held == before:
                return

    def _advance_outside(self) -> Iterator[Piece]:
        """Emit text up to an opening mark, or up to the possible start of one."""
        at = self._held.find(self._begin)
        if at < 0 and self._may_be_unmarked(self._held):
            return
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(self._begin) :]
            self._inside = True
        else:
            keep = _overlap(self._held, self._begin)
            text, self._held = self._held[: len(self._held) - keep], self._held[-keep:] * bool(keep)
        # Whitespace between two calls is markup.
        if text and not (self._count and not text.strip()):
            self._text_seen = True
            yield TextPiece(text)

    def _advance_inside(self) -> Iterator[Piece]:
        if self._guaranteed:
            yield from self._advance_stream()
            return
        at = self._held.find(self._end)
        if at < 0:
            return
        body, self._held = self._held[:at], self._held[at + len(self._end) :]
        self._inside = False
        yield from self._calls_or_text(body, f"{self._begin}{body}{self._end}")

    def _advance_stream(self) -> Iterator[Piece]:
        """Emit a guaranteed call: its name once it is known, then its arguments as they arrive."""
        if self._stream is None:
            head = _HEAD.match(self._held)
            if head is None:
                self._skip_tail()
                return
            yield CallStart(self._count, json.loads(head[1]))
            self._stream = _ArgumentsStream(self._count)
            self._count += 1
            self._held = self._held[head.end() :]
        pieces, rest = self._stream.push(self._held)
        yield from pieces
        self._held = rest
        if self._stream.done:
            self._stream = None

    def _skip_tail(self) -> None:
        """Skip the closing mark of a guaranteed call, or of a list of them."""
        if self._end and (at := self._held.find(self._end)) >= 0:
            self._held = self._held[at + len(self._end) :]
            self._inside = False

    def _advance_bare(self) -> Iterator[Piece]:
        """Advance in a format without marks, in which a whole answer is either calls or text."""
        if self._guaranteed:
            while self._held:
                before = self._held
                yield from self._advance_stream()
                if self._held == before:
                    return
        elif self._text_seen or not self._may_be_bare(self._held):
            text, self._held = self._held, ""
            self._text_seen = True
            if text:
                yield TextPiece(text)

    def _may_be_bare(self, text: str) -> bool:
        begun = text.lstrip()
        return not begun or any(
            begun.startswith(start) or start.startswith(begun) for start in self._form.starts
        )

    def _may_be_unmarked(self, text: str) -> bool:
        """Return True if the answer so far may be calls of offered tools without their marks."""
        is_first = not (self._text_seen or self._count or self._inside or self._guaranteed)
        return is_first and bool(self._begin and self._offered and _UNMARKED.fullmatch(text))

    def _unmarked(self, text: str) -> list[Piece]:
        """Return the calls of a whole answer, or all of it as text."""
        calls = parse_calls(_without_fence(text), self._form, needs_arguments=True)
        if not calls or not self._knows(calls):
            return [TextPiece(text)]
        return self._calls_or_text(_without_fence(text), text)

    def _calls_or_text(self, body: str, as_text: str) -> list[Piece]:
        calls = parse_calls(body, self._form)
        if calls and not self._begin and not self._knows(calls):
            return [TextPiece(as_text)]  # without marks, an object with a name may be an answer
        if not calls or not self._may(calls):
            if calls or _looks_like_call(body) or self._begin:
                self.malformed += 1
            return [TextPiece(as_text)]
        pieces: list[Piece] = []
        for name, arguments in calls:
            pieces += [CallStart(self._count, name), CallArguments(self._count, arguments)]
            self._count += 1
        return pieces

    def _knows(self, calls: Sequence[tuple[str, str]]) -> bool:
        return self._offered is None or all(name in self._offered for name, _ in calls)

    def _may(self, calls: Sequence[tuple[str, str]]) -> bool:
        if self._at_most is not None and self._count + len(calls) > self._at_most:
            return False
        return self._allowed is None or all(name in self._allowed for name, _ in calls)


# Start of an answer that may be calls alone: a JSON object, also in a fenced block.
_UNMARKED = re.compile(r"\s*(?:`{0,3}|```(?:j|js|jso|json)?\s*(?:\{.*)?|\{.*)", re.DOTALL)
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


def _without_fence(text: str) -> str:
    found = _FENCED.fullmatch(text)
    return found[1] if found else text


# Start of a call as grammars write it, with the name first.
_HEAD = re.compile(
    r'[\s,;\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class _ArgumentsStream:
    """Scanner that emits one JSON object and drops the brace that closes the call around it."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._depth = 0
        self._in_string = self._escaped = False
        self._whole = False  # the arguments are complete, but the call's own brace is not there yet
        self.done = False

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Return (pieces, text after the call)."""
        end = len(text)
        for at, character in enumerate(text):
            if self._whole:
                if character == "}":
                    self.done = True
                    return [], text[at + 1 :]
                continue
            self._read(character)
            if self._depth == 0:
                self._whole, end = True, at + 1
                _, rest = self.push(text[end:])
                return self._pieces(text[:end]), rest
        return ([] if self._whole else self._pieces(text[:end])), ""

    def _pieces(self, text: str) -> list[Piece]:
        return [CallArguments(self._index, text)] if text else []

    def _read(self, character: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


def parse_calls(
    body: str, form: ToolFormat, *, needs_arguments: bool = False
) -> list[tuple[str, str]]:
    """Return (name, arguments as JSON text) of each call, or [] if any part of the text is not a
    call.

    With `needs_arguments`, neither is an object without them.
    """
    text = body.strip().removeprefix("<|python_tag|>").strip()
    if form.pythonic and text.startswith("["):
        return _python_calls(text)
    decoder = json.JSONDecoder()
    found: list[Any] = []
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        found += value if isinstance(value, list) else [value]
        if needs_arguments and not all(_has_arguments(value) for value in found):
            return []
        text = text[end:].lstrip(" \n\r\t;,")
    calls = [_call(value) for value in found]
    return [call for call in calls if call] if all(calls) else []


def _has_arguments(value: Any) -> bool:
    return isinstance(value, dict) and bool({"arguments", "parameters"} & value.keys())


def _call(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a JSON string
        arguments = read_arguments(arguments.strip() or "{}")
    if arguments is None:
        arguments = {}
    text = _as_json(arguments) if isinstance(arguments, dict) else None
    return None if text is None else (value["name"], text)


def read_arguments(text: str) -> Any:
    """Return the value of JSON text, or the text itself if it cannot be used.

    It cannot if it is not JSON, nests too deep, or has more than MAX_VALUES names and values.
    """
    # A lone surrogate cannot be encoded, and does not matter for the count.
    if len(text) > MAX_VALUES and has_more_values(text.encode(errors="replace"), MAX_VALUES):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if is_deep(value) else value


def _as_json(arguments: dict[str, Any]) -> str | None:
    """Return arguments as JSON text, or None if they nest too deep or JSON cannot express them.

    Python reads values that JSON cannot express: NaN, 1e999, half a surrogate pair.
    """
    if is_deep(arguments):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return None
    return text


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return the calls in `[f(a=1), g(b="x")]`, parsed as syntax and never run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # such as "\\d" in a string
            tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else []
        calls = [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []
    return [call for call in calls if call] if all(calls) else []


def _python_call(node: ast.expr) -> tuple[str, str] | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        return None
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return None
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    text = _as_json(arguments)
    return None if text is None else (name, text)


def _looks_like_call(text: str) -> bool:
    return '"name"' in text


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `mark`, but not all of
    it.
    """
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)
