"""Sections of settings, checked by the types of their fields.

A type states the values it allows: `slots: Count`, `kl_in: Literal["loss", "reward"]`.
"""

import math
import operator
from dataclasses import astuple, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

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
        bounds = [(LIMITS[type(limit)][1], *astuple(limit)) for limit in parts[1:]]
        texts = [f"{word} {x}" if math.isfinite(x) else "finite" for word, x in bounds]
        return " and ".join(dict.fromkeys(texts))
    return "none" if hint is NoneType else ""


def is_allowed(value: Any, hint: Any) -> bool:
    """Return False for a value out of a type's range, or not among its choices."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(is_allowed(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is Annotated:
        limits = [(LIMITS[type(limit)][0], *astuple(limit)) for limit in parts[1:]]
        return value is not None and all(holds(value, bound) for holds, bound in limits)
    return hint is not NoneType or value is None
