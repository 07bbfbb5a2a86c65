"""Syntax of tool calls: whole texts to names and arguments."""

import ast
import json
import re
import warnings
from typing import Any

from lightning_jax.gateway.fields import has_more_values, is_deep
from lightning_jax.gateway.prompt.tool_formats import ToolFormat

MAX_VALUES = 50_000  # names and values in a call's arguments; longer arguments stay text


def parse_calls(
    body: str, form: ToolFormat, *, needs_arguments: bool = False
) -> list[tuple[str, str]]:
    """Return (name, arguments as JSON text) of each call, or [] if any part of the text is not a
    call.

    With `needs_arguments`, neither is an object without them.
    """
    text = body.strip().removeprefix("<|python_tag|>").strip()
    if form.pythonic and text.startswith("[") and (calls := _python_calls(text)):
        return calls
    decoder = json.JSONDecoder()
    values: list[Any] = []
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        values += value if isinstance(value, list) else [value]
        if needs_arguments and not all(
            isinstance(value, dict) and {"arguments", "parameters"} & value.keys()
            for value in values
        ):
            return []
        text = text[end:].lstrip(" \n\r\t;,")
    calls = [_call(value) for value in values]
    return [call for call in calls if call] if all(calls) else []


def _call(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = read_arguments(value.get("arguments", value.get("parameters", {})))
    text = _as_json(arguments) if isinstance(arguments, dict) else None
    return None if text is None else (value["name"], text)


def read_arguments(arguments: Any) -> Any:
    """Return a call's arguments as a value. Null and an empty string mean no arguments.

    Some models and clients write the value as JSON text. Return the text itself if it is not JSON
    (for example because it was cut off), nests too deep, or has more than MAX_VALUES names and
    values.
    """
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    text = arguments.strip() or "{}"
    # A lone surrogate cannot be encoded, and does not matter for the count.
    if len(text) > MAX_VALUES and has_more_values(text.encode(errors="replace"), MAX_VALUES):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if is_deep(value):
        return text
    return {} if value is None else value


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


_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)


class JsonStrings:
    """Strings of JSON text that grows at its end. Places are asked for in ascending order."""

    def __init__(self) -> None:
        self._at, self._is_open = 0, False

    def contain(self, text: str, place: int) -> bool:
        """Return whether a place is inside a string. None is after a backslash outside of one."""
        while self._at < place:
            if self._is_open:
                end = _IN_STRING.match(text, self._at, place).end()  # type: ignore[union-attr]
                if end < place and text[end] == "\\":  # the last character before the place
                    self._at = end
                    return True
            else:
                quote = text.find('"', self._at, place)
                end = place if quote < 0 else quote
                if text.find("\\", self._at, end) >= 0:
                    return False  # not JSON
            self._at = min(end + 1, place)
            self._is_open ^= end < place
        return self._is_open


class ObjectScanner:
    """Incremental scanner of one JSON object and the brace that closes the call around it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self._is_whole = False  # the call's own brace is not there yet
        self.done = False

    def push(self, text: str) -> tuple[str, str]:
        """Return the next text of the object, and the text after the call."""
        end = 0
        for index, character in enumerate(text, 1):
            if not self._is_whole:
                self._read(character)
                self._is_whole, end = self._depth == 0, index
            elif character == "}":
                self.done = True
                return text[:end], text[index:]
        return text[:end], ""

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
