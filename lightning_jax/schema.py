"""Sections of settings, checked by the types of their fields.

A type states the values it allows: `slots: Count`, `kl_in: Literal["loss", "reward"]`.
"""

import math
import operator
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Lt

from lightning_jax.errors import FieldError

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]
FiniteNonNegative = Annotated[float, Ge(0), Lt(math.inf)]
FinitePositive = Annotated[float, Gt(0), Lt(math.inf)]

DERIVED: Any = None  # default of a setting that follows from others


class PathKind(Enum):
    """Form in which a setting names a file. `settings/paths.py` reads it."""

    FUNCTION = "FILE:FUNCTION"
    PROGRAM = "a program; a path if it has a slash"
    NAME = "a file or folder if there is one, else a name"
    COMMAND = "a program and its arguments"


FunctionRef = Annotated[str, PathKind.FUNCTION]
ProgramPath = Annotated[str, PathKind.PROGRAM]
PathOrName = Annotated[str, PathKind.NAME]

LIMITS = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


class Section:
    """Base class of frozen dataclasses of settings.

    Raises FieldError for the first value that the type of its field does not allow.
    """

    def __post_init__(self) -> None:
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            reason = "unknown" if isinstance(value, str) else "invalid"
            allowed = is_allowed(value, field.type), describe(field.type), reason
            require(self, **{field.name: allowed})


def require(section: object, **conditions: tuple[bool, str] | tuple[bool, str, str]) -> None:
    """Raise FieldError for the first field whose condition is false.

    The text says what is expected. An optional third item is the error's reason.
    """
    for name, (holds, expected, *reason) in conditions.items():
        if not holds:
            message = f"{name} is {getattr(section, name)!r}; expected {expected}."
            raise FieldError(message, reason=reason[0] if reason else "invalid", key=name)


def describe(hint: Any) -> str:
    """Return the values that a type allows, such as "at least 1, or none", or "" for all."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return ", or ".join(filter(None, map(describe, parts)))
    if kind is Literal:
        return " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    if kind is Annotated:
        bounds = [(LIMITS[type(limit)][1], *astuple(limit)) for limit in _limits(parts)]
        texts = [f"{word} {x}" if math.isfinite(x) else "finite" for word, x in bounds]
        return " and ".join(dict.fromkeys(texts))
    if kind is list:
        return describe(parts[0])
    return "none" if hint is NoneType else ""


def is_allowed(value: Any, hint: Any) -> bool:
    """Return False for a value out of a type's range, or not among its choices."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(is_allowed(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is Annotated:
        limits = [(LIMITS[type(limit)][0], *astuple(limit)) for limit in _limits(parts)]
        return all(value is not None and holds(value, bound) for holds, bound in limits)
    if kind is list:
        return all(is_allowed(item, parts[0]) for item in value)
    return hint is not NoneType or value is None


def _limits(parts: tuple[Any, ...]) -> list[Any]:
    return [part for part in parts[1:] if type(part) in LIMITS]


def is_plain_url(text: str) -> bool:
    """Return True for the http(s) URL of a server, without a user, query or fragment."""
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    is_plain = not (url.username or url.password or url.query or url.fragment)
    return url.scheme in ("http", "https") and bool(url.hostname) and is_plain


def path_kind(hint: Any) -> PathKind | None:
    """Return how values of a type name a file, or None if they do not."""
    if get_origin(hint) is Annotated:
        return next((part for part in get_args(hint) if isinstance(part, PathKind)), None)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return next(filter(None, map(path_kind, parts)), None)


@dataclass(frozen=True)
class Inner:
    """Section that a field holds: by itself, or as the values of a dict by name."""

    section: type
    is_dict: bool = False


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def inner_section(hint: Any) -> Inner | None:
    """Return the section in a field of this type, or None if the field is a plain setting."""
    if is_section(hint):
        return Inner(hint)
    if get_origin(hint) is dict:
        of_value = get_args(hint)[-1]
        return Inner(of_value, is_dict=True) if is_section(of_value) else None
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return next(filter(None, map(inner_section, parts)), None)


def section_keys(section: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting and section, with NAME for names that users choose."""
    for field in fields(section):  # pyright: ignore[reportArgumentType]
        yield prefix + field.name
        if inner := inner_section(field.type):
            name = ".NAME." if inner.is_dict else "."
            yield from section_keys(inner.section, prefix + field.name + name)
