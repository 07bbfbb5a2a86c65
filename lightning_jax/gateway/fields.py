"""Limits and fields of JSON bodies, with errors that name the invalid field."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from lightning_jax.engine.types import MAX_TOP_LOGPROBS
from lightning_jax.gateway.errors import invalid
from lightning_jax.settings.schema import first_problem

Body = dict[str, Any]
MAX_INT32 = 2**31 - 1
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
    texts = (item for item in json_items(value) if isinstance(item, str) and not item.isascii())
    return any("\ud800" <= char <= "\udfff" for text in texts for char in set(text))


def json_items(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all names and values in it.

    An item is expanded only when the caller asks for the next one, so a caller can stop early.
    """
    items = [value]
    while items:
        item = items.pop()
        yield item
        if isinstance(item, dict):
            items += item.keys()
            items += item.values()
        elif isinstance(item, list | tuple):
            items += item


class Fields(BaseModel):
    """Known fields of a JSON object. Null counts as missing.

    A class made with `extra="allow"` has the other fields in `model_extra`.
    """

    model_config = ConfigDict(strict=True)

    @classmethod
    def read(cls, body: Any) -> Self:
        """Return the fields of a JSON object. Raise ApiError that names the first invalid field."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            problem = first_problem(error)
            path, reason = problem.path, problem.reason
            where = _written(path, body, is_missing=reason == "missing")
            raise invalid(
                problem.sentence(where),
                str(path[0]),
                _CODES.get((reason, len(path) == 1), "invalid_value"),
                reason=reason,
                key=where,
            ) from error


def _written(path: Sequence[int | str], value: Any, *, is_missing: bool) -> str:
    """Return the path of a field in a body, such as `tools[0].name`.

    Pydantic also puts the type of an object that may have several types into a path. A missing
    field is the last part.
    """
    written = ""
    for index, part in enumerate(path):
        if isinstance(part, int):
            written += f"[{part}]"
            value = value[part] if isinstance(value, list) else None
        elif isinstance(value, dict) and (part in value or (is_missing and index == len(path) - 1)):
            written += f".{part[:50]}"
            value = value.get(part)
    return written.removeprefix(".")


# Codes by reason, and by whether the field is at the top of the body.
_CODES = {
    ("wrong_type", True): "invalid_type",
    ("unsupported", True): "unsupported_parameter",
    ("unsupported", False): "unsupported_parameter",
}


def _clamped(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return float(min(max(value, -MAX_INT32), MAX_INT32))  # an integer may be too large for a float


def _whole(value: Any) -> Any:
    # JSON has one kind of number, and some clients write 16.0.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _strings(value: Any) -> Any:
    """Return a string, or a list of strings, as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value or ()) if isinstance(value, list) or not value else value


def harmless(*values: Any) -> AfterValidator:
    """Return a check of a field that no text policy can support: these values ask for nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in values:
            raise PydanticCustomError("unsupported", "leave it out, because it is not supported")
        return value

    return AfterValidator(check)


T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
Integer = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_clamped)]
TopLogprobs = Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Arguments = Annotated[dict[str, Any], BeforeValidator(lambda value: value or {})]
# Number of tokens to choose from. 0 is no limit, and so is -1 for some clients.
TopK = Annotated[Integer, AfterValidator(lambda value: min(max(0, value), MAX_INT32))]
Strings = Annotated[tuple[str, ...], Field(fail_fast=True), BeforeValidator(_strings)]


class SamplingFields(Fields):
    """Fields that most dialects name alike."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: TopK | None = None
    seed: Integer | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
