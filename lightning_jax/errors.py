"""Errors that say to programs, in `reason` and `key`, what their message says to people."""


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


def require(section: object, **conditions: tuple[bool, str] | tuple[bool, str, str]) -> None:
    """Raise FieldError for the first field whose condition is false.

    The text says what is expected. An optional third item is the error's reason.
    """
    for name, (holds, expected, *reason) in conditions.items():
        if not holds:
            message = f"{name} is {getattr(section, name)!r}; expected {expected}."
            raise FieldError(message, reason=reason[0] if reason else "invalid", key=name)
