"""Reading a JSON body field by field; what is wrong is named in an error of the right shape."""

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from lightning_jax.gateway.errors import ApiError, invalid

log = logging.getLogger(__name__)

Body = dict[str, Any]
MAX_INT32 = 2**31 - 1
MAX_NAMED = 5  # unknown fields of one body that the log names
MAX_WARNINGS = 100  # unknown fields of one dialect that the log names
_warned: defaultdict[str, set[str]] = defaultdict(set)
MAX_DEPTH = 100  # of lists and objects in each other; code that recurses has room for it


def as_object(body: object) -> Body:
    """The body, if it is a JSON object. Raises ApiError."""
    if not isinstance(body, dict):
        raise invalid(
            f"the body is {type(body).__name__}; expected a JSON object.", reason="wrong_type"
        )
    if is_deep(body):
        raise invalid(
            f"the body nests deeper than {MAX_DEPTH} levels; expected fewer.", reason="too_deep"
        )
    return body


def is_deep(value: Any) -> bool:
    """Whether lists and objects nest deeper than MAX_DEPTH."""
    level: list[Any] = [value] if isinstance(value, dict | list | tuple) else []
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list | tuple)]
        if not level:
            return False
    return True


def has_more_values(raw: bytes, limit: int) -> bool:
    """Whether JSON text has more than `limit` names and values. It is not read to find out."""
    return num_values(raw) > limit and num_values(_without_strings(raw, limit)) > limit


def num_values(raw: bytes) -> int:
    """Return a number that the names and values of JSON text do not exceed."""
    return 1 + sum(map(raw.count, (b",", b":", b"[", b"{")))


def _without_strings(raw: bytes, limit: int) -> bytes:
    """Return JSON text with what stands in strings left out, or, if it has more than `limit`
    strings, so many commas.
    """
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 2 * limit:
        return b"," * limit
    return b"".join(plain.split(b'"')[::2])


def has_surrogates(value: Any) -> bool:
    """Whether a string in the JSON value holds half of a surrogate pair, which no UTF-8 has."""
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
    """`body[name]` if it is of that kind, the default where it is missing or null."""
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
        value = int(value)  # JSON knows one kind of number, and some clients write 16.0
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
    """A number, within bounds where given."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(name, value, "a number")
    value = float(min(max(value, -MAX_INT32), MAX_INT32))  # an integer may be too long for a float
    if not low <= value <= high:
        raise invalid(
            f"{name} is {value:g}; expected {low:g} to {high:g}.", name, reason="out_of_range"
        )
    return value


def bounded(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """An integer from `low` to `high`."""
    value = integer(body, name, default)
    assert value is not None, "there is a default"
    if not low <= value <= high:
        raise invalid(
            f"{name} is {brief(value)}; expected {low} to {high}.", name, reason="out_of_range"
        )
    return value


def top_k(body: Mapping[str, Any], name: str = "top_k") -> int:
    """The number of tokens to choose from; 0 for no limit, which some clients write as -1."""
    return min(max(0, integer(body, name) or 0), MAX_INT32)


def strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A string or a list of strings, as a tuple."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise _wrong_type(name, value, "a string or a list of strings")
    return tuple(found)


def objects(body: Mapping[str, Any], name: str) -> list[Body]:
    """A list of objects; empty where missing or null."""
    value = field(body, name, list, [], "a list of objects")
    if not all(isinstance(item, dict) for item in value):
        raise invalid(
            f"{name} is {brief(value)}; expected a list of objects.", name, reason="wrong_type"
        )
    return value


def refuse_unsupported(body: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError for a field that no text policy can obey, unless its value asks for nothing.

    `harmless`: such fields, each with the values that ask for nothing.
    """
    for name, values in harmless.items():
        if body.get(name) not in (None, *values):
            raise invalid(
                f"{name} is {brief(body[name])}, which this server cannot do; expected it left "
                "out.",
                name,
                "unsupported_parameter",
                reason="unsupported",
            )


def _wrong_type(name: str, value: Any, expected: str) -> ApiError:
    return invalid(
        f"{name} is {brief(value)}; expected {expected}.", name, "invalid_type", reason="wrong_type"
    )


def brief(value: Any) -> str:
    """The value as an error shows it, cut where it is long."""
    if isinstance(value, str):
        value = value[:101]
    shown = f"an integer of {value.bit_length()} bits" if _is_huge(value) else repr(value)
    return shown if len(shown) <= 100 else shown[:97] + "..."


def _is_huge(value: Any) -> bool:
    # Python refuses to print the longest.
    return isinstance(value, int) and value.bit_length() > 256


def warn_unknown(dialect: str, body: Mapping[str, Any], known: Collection[str]) -> None:
    """Log the fields that this server does not know.

    A field is named once, and so are a body's first few. Further fields are counted. There are at
    most `MAX_WARNINGS` such lines for a dialect.
    """
    unknown = [name for name in body if name not in known]
    told = _warned[dialect]
    fresh = [name for name in (name[:100] for name in unknown[:MAX_NAMED]) if name not in told]
    if not fresh or len(told) >= MAX_WARNINGS:
        return
    told.update(fresh)
    more = len(unknown) - MAX_NAMED
    log.warning(
        "%s requests have fields that are unknown here and ignored: %s%s%s",
        dialect,
        ", ".join(map(repr, fresh)),
        f" and {more} more" if more > 0 else "",
        "; no more of them are logged" if len(told) >= MAX_WARNINGS else "",
        extra={"event": "unknown_fields", "fields": fresh, "num_more": max(0, more)},
    )
