"""jinja2 sandbox with limits on time, text length and size of numbers.

A chat template comes with weights that anyone may have published. jinja2's own sandbox keeps it
away from Python's objects, but lets it loop forever and fill the memory.
"""

import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

from lightning_jax.errors import FieldError

TIME_LIMIT_S = 5.0  # CPU seconds of one rendering; an honest template takes milliseconds
MAX_LENGTH = 2**25  # characters of a text, members of a list
MAX_BITS = 128  # bits of an integer
MAX_KWARGS, MAX_KWARGS_CHARS = 64, 2**16  # number of variables, and their length as JSON
RENDERED = ("messages", "tools", "add_generation_prompt")  # variables that every rendering sets
_MAX_WIDTH = 10_000  # characters to which filters and methods may pad a text
# A large width in a format, or one that an argument supplies.
_WIDTH = re.compile(
    r"% (?:\([^)]*\))? [-+\ \#0]* (?:\d{5}|\*) | \{[^{}]*:[^{}]* (?:\d{5}|\{)", re.X
)
_SIZED_FILTERS = {"batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap"}
_state = threading.local()


class LimitError(jinja2.TemplateError):
    """Error raised when a template exceeds a limit."""


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox that checks the limits at every loop iteration, call, filter and operator."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]

    def limit(self, filters: dict[str, Callable[..., Any]]) -> None:
        """Add filters, and apply the limits to these and all existing filters."""
        self.filters |= filters
        self.filters = {name: _limited(name, function) for name, function in self.filters.items()}

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Return the rendered text. Raises LimitError, or any error that the template raises."""
        pieces, length = [], 0
        for piece in template.generate(variables):
            check_value()
            length += len(piece)
            _check_length(length)
            pieces.append(piece)
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        parsed = super()._parse(source, name, filename)
        return _Checks().visit(parsed)

    @staticmethod
    def concat(pieces: Any) -> str:
        """Join the output of a macro or a block."""
        return join_text(*pieces)

    def join_text(self, *parts: Any) -> str:
        """Join the operands of `~`."""
        return join_text(*parts)

    def check_time(self) -> str:
        """Check the limits at the start of a loop iteration."""
        check_value()
        return ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= MAX_BITS):
            raise LimitError("an exponentiation is too large")
        if operator == "*":
            for many, number in ((left, right), (right, left)):
                if isinstance(many, str | bytes | list | tuple) and isinstance(number, int):
                    _check_length(len(many) * number)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return check_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_value()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_method(owner, getattr(__obj, "__name__", ""), args)
        return check_value(super().call(__context, __obj, *args, **kwargs))


class _Checks(jinja2.visitor.NodeTransformer):
    """Transformer that makes loops check the time and `~` check the length."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        self.generic_visit(node)
        called = _call("check_time", [], node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(called, lineno=node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Call:
        self.generic_visit(node)
        return _call("join_text", node.nodes, node.lineno)


def _call(name: str, arguments: list[jinja2.nodes.Expr], line: int) -> jinja2.nodes.Call:
    attribute = jinja2.nodes.EnvironmentAttribute(name, lineno=line)
    return jinja2.nodes.Call(attribute, arguments, [], None, None, lineno=line)


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise FieldError for variables that no template should get.

    They come from requests and settings as `chat_template_kwargs`.
    """
    for name in kwargs:
        if name in RENDERED:
            raise _unfit(f"sets {name!r}, which every rendering sets; leave it out.", "reserved")
        if not (name.isidentifier() and len(name) <= 100):
            short = name if len(name) <= 100 else name[:97] + "..."
            raise _unfit(f"has the name {short!r}; expected a variable's name.", "unknown")
    if len(kwargs) > MAX_KWARGS:
        raise _unfit(f"has {len(kwargs)} names; expected at most {MAX_KWARGS}.", "too_many")
    _check_values(kwargs)
    if (length := len(json.dumps(kwargs))) > MAX_KWARGS_CHARS:
        problem = f"has {length} characters as JSON; expected at most {MAX_KWARGS_CHARS}."
        raise _unfit(problem, "too_long")


def _check_values(kwargs: Mapping[str, Any]) -> None:
    """Raise FieldError for a value that JSON lacks, or a number that is not finite or too large."""
    rest: list[Any] = list(kwargs.values())
    while rest:
        value = rest.pop()
        if isinstance(value, dict | list | tuple):
            rest += [*value, *value.values()] if isinstance(value, dict) else value
        elif value is not None and not isinstance(value, str | int | float):
            raise _unfit(f"has a {type(value).__name__}; expected JSON values.", "wrong_type")
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise _unfit(f"has a number of more than {MAX_BITS} bits.", "out_of_range")
        elif isinstance(value, float) and not math.isfinite(value):
            raise _unfit(f"has the number {value}; expected a finite one.", "out_of_range")


def _unfit(problem: str, reason: str) -> FieldError:
    name = "chat_template_kwargs"
    return FieldError(f"{name} {problem}", reason=reason, key=name)


def start_clock() -> None:
    """Start the clock for this thread's next template.

    Call it before compiling, because compiling may run parts of the template.
    """
    _state.deadline = time.thread_time() + TIME_LIMIT_S


def check_value(value: Any = None) -> Any:
    """Return the value. Raises LimitError if the value or the time so far exceeds its limit."""
    if time.thread_time() > _state.deadline:
        raise LimitError(f"rendering takes more than {TIME_LIMIT_S:g} s")
    if isinstance(value, str | bytes | list | tuple | dict):
        _check_length(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise LimitError(f"a number has more than {MAX_BITS} bits")
    return value


def join_text(*parts: Any) -> str:
    """Join the parts to one text. Raises LimitError if it would be too long."""
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # also copies the attribute that tells jinja2 what to pass
    def limited(*args: Any, **options: Any) -> Any:
        check_value()
        passed = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if name in _SIZED_FILTERS:
            _check_widths([*passed[1:], *options.values()])
        if isinstance(passed[0], str):
            _check_method(passed[0], name, passed[1:])
        return check_value(function(*args, **options))

    return limited


def _check_method(text: str | bytes, name: str, arguments: Sequence[Any]) -> None:
    """Raise LimitError if a string method or a filter would return far too long a text."""
    if name in ("format", "format_map"):
        _check_format(str(text))
    elif name == "replace" and len(arguments) >= 2:
        old, new = arguments[:2]
        if isinstance(old, type(text)) and isinstance(new, type(text)):
            _check_length(len(text) + text.count(old) * len(new))  # type: ignore[arg-type]
    elif name == "join" and arguments and hasattr(arguments[0], "__len__"):
        _check_length(len(text) * len(arguments[0]))
    else:
        _check_widths(arguments)


def _check_widths(arguments: Sequence[Any]) -> None:
    if any(isinstance(argument, int) and argument > _MAX_WIDTH for argument in arguments):
        raise LimitError(f"a width is larger than {_MAX_WIDTH}")


def _check_format(text: str) -> None:
    if _WIDTH.search(text):
        raise LimitError("the width of a format is too large")


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise LimitError(f"a text or a list is longer than {MAX_LENGTH}")
