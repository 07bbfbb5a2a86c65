"""Errors of a call, in the format of OpenAI's API."""

from collections.abc import Mapping
from typing import Any

from lightning_jax.errors import Coded, InvalidValue, UserError

# OpenAI's error `type` for each status.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
}


MAX_MESSAGE = 2000  # characters of an error message; the rest is cut


class GatewayError(UserError, RuntimeError):
    """Error that keeps the gateway from starting. Its message is one sentence."""


def our_fault(error: Exception, *, infrastructure: bool = True) -> "ApiError":
    """Return the error for a call that failed with an unexpected exception."""
    message = f"internal server error ({type(error).__name__}); see the server log."
    return ApiError(500, "internal_error", message, infrastructure=infrastructure)


class ApiError(Coded):
    """Error that a call gets instead of an answer.

    `reason` and `key` default to `code` and `param` and may be finer: a message's role has the key
    "messages[0].role" and the param "messages". Clients see neither of them.

    `infrastructure` is True if neither the agent nor the policy caused it. The rollout may then be
    retried.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        infrastructure: bool = False,
        reason: str | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message, reason=reason or code, key=key or param)
        self.status = status
        self.code = code
        # It may quote the caller's text, which can be of any length.
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.param = param
        self.retry_after_s = retry_after_s
        self.infrastructure = infrastructure

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "api_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def named(self, names: Mapping[str, str]) -> "ApiError":
        """Return a copy that uses the dialect's names for request fields.

        A field that is not supported already has the name that the client gave it.
        """
        if self.code == "unsupported_parameter":
            return self
        field, *rest = self.message.split(" ", 1)
        return ApiError(
            self.status,
            self.code,
            " ".join((names.get(field, field), *rest)),
            param=self.param and names.get(self.param, self.param),
            retry_after_s=self.retry_after_s,
            infrastructure=self.infrastructure,
            reason=self.reason,
            key=self.key and names.get(self.key, self.key),
        )

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that go with the body."""
        if self.status == 426:
            return {"Upgrade": "HTTP/1.1", "Connection": "Upgrade"}
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        # OpenAI's clients retry a 5xx on their own, but here the whole rollout is retried.
        return {"x-should-retry": "false"} if self.status >= 500 else {}


def invalid(
    message: str,
    param: str | None = None,
    code: str = "invalid_value",
    *,
    reason: str | None = None,
    key: str | None = None,
) -> ApiError:
    """Return a 400 error for a request that can never succeed as it is."""
    return ApiError(400, code, message, param=param, reason=reason, key=key)


def to_api_error(
    error: ValueError, param: str | None = None, message: str | None = None
) -> ApiError:
    """Return a 400 error for a value that another part of the program rejected."""
    coded = error if isinstance(error, InvalidValue) else InvalidValue()
    return invalid(message or str(error), param, reason=coded.reason, key=coded.key)
