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
