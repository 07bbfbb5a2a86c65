"""Errors that say to programs, in `reason` and `key`, what their message says to people."""

from collections.abc import Callable
from typing import Any, TypeVar

Error = TypeVar("Error", bound="Coded")


class Reason:
    """Class attribute that makes errors with its own name as their reason.

    `ConfigError.missing("data.root", text)` is an error with `text` as its message, the reason
    "missing" and the key "data.root".
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, error: Any, owner: type[Error]) -> Callable[[str | None, str], Error]:
        return lambda key, message: owner(message, reason=self._name, key=key)


class Coded(Exception):
    """Error with a code for programs and a message for people.

    `reason` is a short code in snake_case ("missing", "unknown_key"). `key` names the setting,
    field, path or id in question. Callers and tests read these fields, never the message.
    """

    conflict = Reason()
    empty = Reason()
    invalid = Reason()
    malformed = Reason()
    mismatch = Reason()
    missing = Reason()
    not_found = Reason()
    not_installed = Reason()
    out_of_range = Reason()
    unknown = Reason()
    unsupported = Reason()
    wrong_type = Reason()

    def __init__(self, message: str = "", *, reason: str = "invalid", key: str | None = None):
        super().__init__(message)
        self.reason = reason
        self.key = key


class UserError(Coded):
    """Error that the user can fix.

    The message is one sentence: the fact and the fix.
    """


class InvalidValue(Coded, ValueError):
    """Unusable value from a caller, a file or a request."""


class FieldError(InvalidValue):
    """Error in a field of a section.

    The message begins with the field's name, which is also the error's key. A caller that knows the
    section's path prepends it to both.
    """


def brief(value: Any) -> str:
    """Return the value as error messages show it, cut if it is long."""
    if isinstance(value, str):
        value = value[:101]
    if isinstance(value, int) and value.bit_length() > 256:  # which Python may refuse to print
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
