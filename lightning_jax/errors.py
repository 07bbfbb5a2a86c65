"""Errors that say to programs, in `reason` and `key`, what their message says to people."""

from typing import Any


class Coded(Exception):
    """Error with a code for programs and a message for people.

    `reason` is a short code in snake_case ("missing", "unknown_key"). `key` names the setting,
    field, path or id in question. Callers and tests read these fields, never the message.
    """

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
