"""What can go wrong with a call, as OpenAI's API says it."""

from collections.abc import Mapping
from typing import Any

from lightning_jax.types import Coded, InvalidValue, UserError

# OpenAI's `type` of each status.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


MAX_MESSAGE = 2000  # characters of an error's message; the rest is cut


class GatewayError(UserError, RuntimeError):
    """The gateway cannot start; the message is one sentence."""


def our_fault(error: Exception, *, infrastructure: bool = True) -> "ApiError":
    """Return the answer to a call that failed by an error that nobody foresaw."""
    message = f"the server failed ({type(error).__name__}); see its log."
    return ApiError(500, "internal_error", message, infrastructure=infrastructure)


class ApiError(Coded):
    """A call that gets an error body instead of an answer.

    `reason` and `key` are finer than the body's `code` and `param`, which they are if left out: the
    key of a message's role is "messages[0].role", its param "messages". Neither is sent.

    `infrastructure` is True where neither the agent nor the policy is to blame, so the rollout may
    be tried again.
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
        # A caller's own text may be in it, of any length.
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
        """The same, calling a field of the gateway's own requests as its dialect does."""
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
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        # OpenAI's clients try a 5xx again on their own; here the whole rollout is tried again.
        return {"x-should-retry": "false"} if self.status >= 500 else {}


def invalid(
    message: str,
    param: str | None = None,
    code: str = "invalid_value",
    *,
    reason: str | None = None,
    key: str | None = None,
) -> ApiError:
    """The 400 for a request that can never work as it stands."""
    return ApiError(400, code, message, param=param, reason=reason, key=key)


def to_api_error(
    error: ValueError, param: str | None = None, message: str | None = None
) -> ApiError:
    """Return the 400 for a value that another part of the program did not take."""
    coded = error if isinstance(error, InvalidValue) else InvalidValue()
    return invalid(message or str(error), param, reason=coded.reason, key=coded.key)
