"""Sections of settings: frozen dataclasses whose values pydantic checks.

A type states the values it allows: `slots: Count`, `kl_in: Literal["loss", "reward"]`. The text
below a field describes it. `rules` has what must hold between fields.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, astuple, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import wraps
from itertools import takewhile
from operator import attrgetter
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic import dataclasses as checked
from pydantic_core import PydanticCustomError

from lightning_jax.errors import FieldError, InvalidValue, brief

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Finite = Annotated[float, AllowInfNan(False)]
FiniteNonNegative = Annotated[float, Ge(0), AllowInfNan(False)]
FinitePositive = Annotated[float, Gt(0), AllowInfNan(False)]

DERIVED: Any = None  # default of a setting that follows from others
# Placeholder for a secret in a saved file. Loading such a file requires the value to be set.
HIDDEN = "???"
SECRET = "api_key"  # field that is never saved or shown, in any section
VARIABLES = ("env", "sampler_env", "headers")  # fields of NAME=value that are never shown

T = TypeVar("T")


class PathKind(Enum):
    """Form in which a setting names a file. `settings/paths.py` reads it."""

    FUNCTION = "FILE:FUNCTION"
    CLASS = "FILE:CLASS"
    PROGRAM = "a program; a path if it has a slash"
    NAME = "a file or folder if there is one, else a name"
    COMMAND = "a program and its arguments"

    @property
    def is_reference(self) -> bool:
        """True for a file and a name in it."""
        return self in (PathKind.FUNCTION, PathKind.CLASS)


def expect(holds: Callable[[Any], object], expected: str, reason: str = "invalid") -> Any:
    """Return a check of one value, for `Annotated`. The text says what is expected."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError(reason, "expected {text}", {"text": expected})  # pyright: ignore[reportArgumentType]
        return value

    return AfterValidator(check)


def shown_as(change: Callable[[Any], Any]) -> PlainSerializer:
    """Return how `plain` shows the values of a type, for `Annotated`."""

    def serialize(value: Any, info: Any) -> Any:
        return value if info.context else change(value)

    return PlainSerializer(serialize)


FunctionRef = Annotated[
    str,
    PathKind.FUNCTION,
    expect(lambda text: ":" in text, "FILE:FUNCTION, such as agent.py:run"),
]
ClassRef = Annotated[
    str,
    PathKind.CLASS,
    expect(lambda text: ":" in text, "FILE:CLASS, such as mine.py:Mine"),
]
ProgramPath = Annotated[str, PathKind.PROGRAM]
PathOrName = Annotated[str, PathKind.NAME]
PLAIN_URL = "an http(s) URL without a user, query or fragment"
Url = Annotated[str, expect(lambda url: is_plain_url(url), PLAIN_URL)]


def _without_removed(entries: Any) -> Any:
    """Return a table without its empty entries, with which a file removes those of its base."""
    if isinstance(entries, Mapping):
        return {name: entry for name, entry in entries.items() if entry is not None}
    return entries


Table = Annotated[dict[str, T], BeforeValidator(_without_removed)]  # settings by name

Rule = tuple[str, object, str] | tuple[str, object, str, str]


class Section:
    """Base class of settings that `section` decorates."""

    def __post_init__(self) -> None:
        check_rules(self, self.rules())

    def rules(self) -> Iterable[Rule]:
        """Return what has to hold between settings, each with the error if it does not.

        A rule is a key, whether it holds, and a text that follows the key in the error, or the key
        and its value if it begins with "expected". A fourth item is a reason other than
        "conflict".
        """
        return ()


def check_rules(record: object, rules: Iterable[Rule]) -> None:
    """Raise FieldError for the first rule of a record that does not hold."""
    for key, holds, text, *reason in rules:
        if not holds:
            if text.startswith("expected "):
                text = f"is {attrgetter(key)(record)!r}; {text}"
            raise FieldError(f"{key} {text}.", reason=(*reason, "conflict")[0], key=key)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def section(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass that checks its values.

    The constructor raises FieldError for the first value that its type or a rule does not allow.
    """
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, use_attribute_docstrings=True)
    cls: Any = checked.dataclass(kind, frozen=True, config=config)
    construct = cls.__init__

    @wraps(construct)
    def init(self: T, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except ValidationError as error:
            raise field_error(error) from None

    cls.__init__ = init
    return cls


def from_plain(kind: type[T], values: Any) -> T:
    """Return the section with these plain settings. Raises pydantic's ValidationError."""
    return TypeAdapter(kind).validate_python(values)


def plain(section: Any, is_whole: bool = False) -> dict[str, Any]:
    """Return the settings as nested dicts, with names of functions unless `is_whole`."""
    adapter = TypeAdapter(type(section))
    return adapter.dump_python(section, context=is_whole, warnings="none")


@dataclass(frozen=True)
class Problem:
    """First invalid value that pydantic found, and what was expected."""

    path: tuple[int | str, ...]
    value: Any
    reason: str
    expected: str
    cause: Any  # exception raised by the rules of a section

    def sentence(self, where: str) -> str:
        value = "missing" if self.reason == "missing" else brief(self.value)
        return f"{where} is {value}; {self.expected}."


def first_problem(error: ValidationError) -> Problem:
    """Return the problem to report, first of all a field that nothing supports."""
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda error: error["type"] != "unsupported")
    path, value, context = first["loc"], first["input"], first.get("ctx", {})
    if "tag" in context:  # unknown type of one of several objects
        path, value = (*path, context["discriminator"].strip("'")), context["tag"]
    reason, expected = first["type"], first["msg"]
    if reason in _ERRORS:
        numbers = {name: f"{x:g}" for name, x in context.items() if isinstance(x, float)}
        reason, expected = _ERRORS[reason][0], _ERRORS[reason][1].format(**context | numbers)
    return Problem(path, value, reason, expected, context.get("error"))


def field_error(error: ValidationError) -> FieldError:
    """Return the error of a section with the whole key of the wrong setting."""
    problem = first_problem(error)
    path = [str(part) for part in takewhile(lambda part: isinstance(part, str), problem.path)]
    if isinstance(cause := problem.cause, InvalidValue):
        prefix = "".join(f"{part}." for part in path)
        return FieldError(f"{prefix}{cause}", reason=cause.reason, key=f"{prefix}{cause.key}")
    key = ".".join(path)
    if problem.reason == UNKNOWN_KEY:
        return FieldError(f"there is no setting {key}.", reason=UNKNOWN_KEY, key=key)
    is_secret = bool({SECRET, *VARIABLES} & set(path))
    problem = replace(problem, value=HIDDEN) if is_secret else problem
    return FieldError(problem.sentence(key), reason=problem.reason, key=key)


UNKNOWN_KEY = "unknown_key"
# Expected types, with pydantic's types of errors.
_TYPES = {
    "a string": ("string_type",),
    "a name": ("string_too_short",),
    "valid UTF-8": ("string_unicode",),
    "true or false": ("bool_type", "bool_parsing"),
    "an integer": ("int_type", "int_parsing", "int_from_float"),
    "a number": ("float_type", "float_parsing"),
    "a list": ("list_type",),
    "a string or a list of strings": ("tuple_type",),
    "an object": ("dict_type", "model_type", "model_attributes_type"),
    "named settings": ("dataclass_type",),
    "at least {min_length}": ("too_short",),
}
# Reason and expectation for types of errors. The types of our own are reasons.
_ERRORS = {
    "missing": ("missing", "add it"),
    "unexpected_keyword_argument": (UNKNOWN_KEY, "leave it out"),
    "union_tag_not_found": ("wrong_type", "add its {discriminator}"),
    "union_tag_invalid": ("unknown", "expected one of {expected_tags}"),
    "literal_error": ("unknown", "expected {expected}"),
    "finite_number": ("out_of_range", "expected a finite number"),
    "greater_than": ("out_of_range", "expected above {gt}"),
    "greater_than_equal": ("out_of_range", "expected at least {ge}"),
    "less_than": ("out_of_range", "expected below {lt}"),
    "less_than_equal": ("out_of_range", "expected at most {le}"),
    "too_long": ("too_many", "expected at most {max_length} entries"),
    **{kind: ("wrong_type", f"expected {x}") for x, kinds in _TYPES.items() for kind in kinds},
}


BOUNDS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}


def describe(hint: Any) -> str:
    """Return the values that a type allows, such as "at least 1, or none", or "" for all."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return ", or ".join(filter(None, map(describe, parts)))
    if kind is Literal:
        return " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    if kind is Annotated:
        bounds = [f"{BOUNDS[type(x)]} {astuple(x)[0]}" for x in parts[1:] if type(x) in BOUNDS]
        bounds += ["finite"] * (AllowInfNan(False) in parts[1:])
        return " and ".join(filter(None, (describe(parts[0]), *bounds)))
    if kind is list:
        return describe(parts[0])
    return "none" if hint is NoneType else ""


def is_plain_url(text: str) -> bool:
    """Return True for the http(s) URL of a server, without a user, query or fragment."""
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    is_plain = not (url.username or url.password or url.query or url.fragment)
    return url.scheme in ("http", "https") and bool(url.hostname) and is_plain


def path_kind(hint: Any) -> PathKind | None:
    """Return how values of a type, or those of a list of it, name a file. None: they do not."""
    if get_origin(hint) is Annotated:
        return next((part for part in get_args(hint) if isinstance(part, PathKind)), None)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType, list) else ()
    return next(filter(None, map(path_kind, parts)), None)


def inner_section(hint: Any) -> type | None:
    """Return the section in a field of this type, or of its dict, or None for a plain setting."""
    if get_origin(hint) is Annotated:
        return inner_section(get_args(hint)[0])
    parts = get_args(hint) if get_origin(hint) in (dict, Union, UnionType) else ()
    return hint if is_dataclass(hint) else next(filter(None, map(inner_section, parts)), None)  # pyright: ignore[reportReturnType]


def has_names(hint: Any) -> bool:
    """Return True for the type of a dict with names that users choose."""
    kind = get_origin(hint)
    return has_names(get_args(hint)[0]) if kind is Annotated else kind is dict


def sections(
    section: Any, node: Any, key: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, dict[str, Any]]]:
    """Yield a section and those in it: its key, its class, and its part of nested settings."""
    if not isinstance(node, dict):
        return
    yield key, section, node
    for field in fields(section):
        inner, value, path = inner_section(field.type), node.get(field.name), (*key, field.name)
        if inner and not has_names(field.type):
            yield from sections(inner, value, path)
        elif inner and isinstance(value, dict):
            for name, below in value.items():
                yield from sections(inner, below, (*path, str(name)))


def defaults(section: Any) -> dict[str, Any]:
    """Return the defaults of a section as nested dicts, with MISSING for a required setting."""
    values = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(section)
    }
    return {name: plain(x) if is_dataclass(x) else x for name, x in values.items()}


def all_defaults(section: Any) -> dict[str, Any]:
    """Return the defaults with all optional sections, and NAME for names that users choose."""
    return _with_optional(section, defaults(section))


def _with_optional(section: Any, node: dict[str, Any]) -> dict[str, Any]:
    for field in fields(section):
        if inner := inner_section(field.type):
            below = _with_optional(inner, node[field.name] or defaults(inner))
            node[field.name] = {"NAME": below} if has_names(field.type) else below
    return node


def section_keys(section: Any) -> Iterator[str]:
    """Yield the dotted key of every setting and section, with NAME for names that users choose."""
    for key, inner, _ in sections(section, all_defaults(section)):
        yield from (".".join((*key, field.name)) for field in fields(inner))
