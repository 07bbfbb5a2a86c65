"""Typed access to the fields of a JSON body, with errors that name the field."""

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from lightning_jax.gateway.errors import ApiError, invalid

log = logging.getLogger(__name__)

Body = dict[str, Any]
MAX_INT32 = 2**31 - 1
MAX_NAMED = 5  # unknown fields logged for one body
MAX_WARNINGS = 100  # unknown fields logged for one dialect
_warned: defaultdict[str, set[str]] = defaultdict(set)
MAX_DEPTH = 100  # of nested lists and objects; recursive code can handle it


def as_object(body: object) -> Body:
    """Return the body if it is a JSON object. Raise ApiError if it is not, or nests too deep."""
    if not isinstance(body, dict):
        raise invalid(
            f"the body is {type(body).__name__}; expected a JSON object.", reason="wrong_type"
        )
    if is_deep(body):
        raise invalid(
            f"the body is nested deeper than {MAX_DEPTH} levels; flatten it.", reason="too_deep"
        )
    return body


def is_deep(value: Any) -> bool:
    """Return whether lists and objects nest deeper than MAX_DEPTH."""
    level: list[Any] = [value] if isinstance(value, dict | list | tuple) else []
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list | tuple)]
        if not level:
            return False
    return True


def has_more_values(raw: bytes, limit: int) -> bool:
    """Return whether JSON text has more than `limit` names and values, without parsing it."""
    return num_values(raw) > limit and num_values(_without_strings(raw, limit)) > limit


def num_values(raw: bytes) -> int:
    """Return an upper bound for the number of names and values in JSON text."""
    return 1 + sum(map(raw.count, (b",", b":", b"[", b"{")))


def _without_strings(raw: bytes, limit: int) -> bytes:
    """Return JSON text without the contents of strings.

    If it has more than `limit` strings, return `limit` commas instead.
    """
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 2 * limit:
        return b"," * limit
    return b"".join(plain.split(b'"')[::2])


def has_surrogates(value: Any) -> bool:
    """Return whether a string in the JSON value has half of a surrogate pair, which is not valid
    UTF-8.
    """
    rest = [value]
    while rest:
        match rest.pop():
            case str(text):
                if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in set(text)):
                    return True
            case dict(inner):
                rest += [*inner, *inner.values()]
            case list(inner):
                rest += inner
    return False


def field(body: Mapping[str, Any], name: str, kind: type, default: Any, expected: str) -> Any:
    """Return `body[name]`, or the default if missing or null. Raise ApiError for other types."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _wrong_type(name, value, expected)
    return value


def text(body: Mapping[str, Any], name: str, default: str = "") -> str:
    return field(body, name, str, default, "a string")


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    return field(body, name, bool, default, "true or false")


def integer(body: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    value = body.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of number, and some clients write 16.0
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(name, value, "an integer")
    return value


def number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    low: float = -math.inf,
    high: float = math.inf,
) -> float:
    """Return a number. Raise ApiError if it is not one or is out of bounds."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(name, value, "a number")
    value = float(min(max(value, -MAX_INT32), MAX_INT32))  # an integer may be too large for a float
    if not low <= value <= high:
        raise invalid(
            f"{name} is {value:g}; expected {low:g} to {high:g}.", name, reason="out_of_range"
        )
    return value


def bounded(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """Return an integer. Raise ApiError if it is not one or is not within `low` to `high`."""
    value = integer(body, name, default)
    assert value is not None, "there is a default"
    if not low <= value <= high:
        raise invalid(
            f"{name} is {brief(value)}; expected {low} to {high}.", name, reason="out_of_range"
        )
    return value


def top_k(body: Mapping[str, Any], name: str = "top_k") -> int:
    """Return the number of tokens to choose from. 0 is no limit, and so is -1 for some clients."""
    return min(max(0, integer(body, name) or 0), MAX_INT32)


def strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise _wrong_type(name, value, "a string or a list of strings")
    return tuple(found)


def objects(body: Mapping[str, Any], name: str) -> list[Body]:
    """Return a list of objects, empty if it is missing or null."""
    value = field(body, name, list, [], "a list of objects")
    if not all(isinstance(item, dict) for item in value):
        raise invalid(
            f"{name} is {brief(value)}; expected a list of objects.", name, reason="wrong_type"
        )
    return value


def refuse_unsupported(body: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ApiError for a field that no text policy can support.

    `harmless` maps each such field to the values that ask for nothing.
    """
    for name, values in harmless.items():
        if body.get(name) not in (None, *values):
            raise invalid(
                f"{name} is {brief(body[name])}, which is not supported; leave it out.",
                name,
                "unsupported_parameter",
                reason="unsupported",
            )


def _wrong_type(name: str, value: Any, expected: str) -> ApiError:
    return invalid(
        f"{name} is {brief(value)}; expected {expected}.", name, "invalid_type", reason="wrong_type"
    )


def brief(value: Any) -> str:
    """Return the value as error messages show it, cut if it is long."""
    if isinstance(value, str):
        value = value[:101]
    shown = f"an integer of {value.bit_length()} bits" if _is_huge(value) else repr(value)
    return shown if len(shown) <= 100 else shown[:97] + "..."


def _is_huge(value: Any) -> bool:
    # Python refuses to print very long integers.
    return isinstance(value, int) and value.bit_length() > 256


def warn_unknown(dialect: str, body: Mapping[str, Any], known: Collection[str]) -> None:
    """Log the fields that this server does not know.

    Each field is named once. Only the first few of a body are named, and the others are counted. A
    dialect gets at most `MAX_WARNINGS` such lines.
    """
    unknown = [name for name in body if name not in known]
    warned = _warned[dialect]
    fresh = [name for name in (name[:100] for name in unknown[:MAX_NAMED]) if name not in warned]
    if not fresh or len(warned) >= MAX_WARNINGS:
        return
    warned.update(fresh)
    more = len(unknown) - MAX_NAMED
    log.warning(
        "ignoring unknown fields in %s requests: %s%s%s",
        dialect,
        ", ".join(map(repr, fresh)),
        f" and {more} more" if more > 0 else "",
        "; further unknown fields are not logged" if len(warned) >= MAX_WARNINGS else "",
        extra={"event": "unknown_fields", "fields": fresh, "num_more": max(0, more)},
    )
