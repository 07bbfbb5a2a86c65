"""Calls that another server answers because of their role, forwarded in both directions.

Their spans hold the request and the answer but no tokens, so these calls cannot train. If all calls
of a gateway are of this kind, no model is loaded.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from urllib.parse import quote

import aiohttp
from aiohttp import web
from yarl import URL

from lightning_jax.engine.admission import LoopStatus
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.generation import EngineError
from lightning_jax.errors import FieldError, brief
from lightning_jax.gateway.calls.record import Recorder, RoutedCall
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.sessions.open_rollouts import HandledCall
from lightning_jax.models.formats.find import tiny_tokenizer
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.settings import ConfigError
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.context import OpenSpan
from lightning_jax.traces.otlp import clip
from lightning_jax.traces.roles import Roles
from lightning_jax.types import Span

# Headers of the agent's request that are forwarded. Credentials and hop-by-hop headers are not.
PASSED_ON = ("accept", "anthropic-version", "anthropic-beta", "openai-beta")
CREDENTIALS = ("key", "api_key", "api-key", "access_token", "token")  # our own, in a query
# Model name in a URL, without characters that a server could read as the end of the path.
MODEL_SEGMENT = re.compile(r"[A-Za-z0-9._@:+-]+")


class _Unusable(ConnectionError):
    """Response of the other server that cannot be forwarded."""


class _Torn(_Unusable):
    """Response that broke off after its beginning had been forwarded."""


@dataclass(frozen=True, kw_only=True)
class ProxiedCall(RoutedCall):
    """Call that another server answers."""

    sent: str  # JSON
    span: OpenSpan
    dialect: str  # wire format of the call
    model_in_path: bool  # as Gemini's clients send it, instead of in the body

    def ended(self, answer: str, status: int) -> Span:
        """Return the call's span with the other server's answer."""
        values = self._values | {attributes.OUTPUT: clip(answer)}
        if status < 400:
            return self.span.end(self._name, values)
        return self.span.fail(self._name, values, f"upstream_{status}", answer[:500])

    def failed(self, reason: str, message: str) -> Span:
        """Return the call's span. `reason` is a short code, and `message` is one sentence."""
        return self.span.fail(self._name, self._values, reason, message)

    def setting(self, name: str, otherwise: str) -> str:
        """Return the setting of the call's role, or `otherwise` if no role of a config matched."""
        return f"roles.{self.route.role_name}.{name}" if self.route.role_name else otherwise

    @property
    def limit_s(self) -> float:
        """Limit of the whole call, which `limit_setting` sets."""
        return self.timeout_s or self.route.role.timeout_s

    @property
    def limit_setting(self) -> str:
        if self.timeout_s:
            return "rollout.call_timeout_s"
        return self.setting("timeout_s", "the limit")

    @property
    def _name(self) -> str:
        return f"{attributes.CHAT} {self.route.model}"

    @property
    def _values(self) -> dict[str, Any]:
        return {
            attributes.OPERATION_NAME: attributes.CHAT,
            attributes.DIALECT: self.dialect,
            attributes.ROLLOUT_ID: self.rollout_id,
            attributes.REQUEST_MODEL: self.route.role.served_model or self.route.model or None,
            attributes.POLICY: self.route.model,
            attributes.AGENT: self.route.agent,
            **self.route.attributes,
            attributes.SERVED_BY: self.route.role.served_by,
            attributes.INPUT: clip(self.sent),
        }


async def pass_on(
    handled: HandledCall, call: ProxiedCall, recorder: Recorder
) -> web.StreamResponse:
    """Forward a call, and return the other server's answer as it streams.

    Mark the call as failed if the answer has status 429 or 5xx. Raise ApiError if there is none.
    """
    try:
        response, answer = await _exchange(handled, _url(handled.request, call), call)
    except ApiError as error:
        await recorder.write(call.rollout_id, call.failed(error.code, error.message))
        raise
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = f"{call.route.role.served_by} did not respond ({type(error).__name__}: {error})"
        expected = f"start that server, or correct {call.setting('served_by', 'its URL')}."
        if isinstance(error, TimeoutError):
            reason = f"{call.route.role.served_by} did not respond within {call.limit_s:g} s"
            expected = f"raise {call.limit_setting}, or look at that server."
        await recorder.write(call.rollout_id, call.failed("upstream_error", reason))
        if isinstance(error, _Torn):
            raise
        raise ApiError(
            502, "upstream_error", f"{reason}; {expected}", infrastructure=True
        ) from error
    except (Exception, asyncio.CancelledError):
        words = "the client disconnected before the response was complete"
        await recorder.write(call.rollout_id, call.failed("call_cancelled", words))
        raise
    await recorder.write(call.rollout_id, call.ended(answer, response.status))
    await response.write_eof()  # now that the call is recorded
    return response


async def _exchange(
    handled: HandledCall, url: URL, call: ProxiedCall
) -> tuple[web.StreamResponse, str]:
    """Return the forwarded response, still open, and its text.

    Redirects are not followed, because they could send our key and the agent's text anywhere.
    """
    sent = handled.request.headers
    headers = {name: sent[name] for name in PASSED_ON if name in sent}
    headers["Content-Type"] = "application/json"
    if key := call.route.role.api_key:
        headers |= {"Authorization": f"Bearer {key}", "x-api-key": key, "x-goog-api-key": key}
    limit = aiohttp.ClientTimeout(total=call.limit_s)
    max_bytes = int(call.route.role.max_response_mib * 2**20)
    pieces: list[bytes] = []
    num_bytes = 0
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(
            url, data=call.sent.encode(), headers=headers, allow_redirects=False
        ) as answer,
    ):
        if 300 <= answer.status < 400:
            raise _Unusable(
                f"it redirects with status {answer.status}; set "
                f"{call.setting('served_by', 'its URL')} to the final one"
            )
        if (answer.content_length or 0) > max_bytes:
            raise _Unusable(_too_long(call))
        if answer.status == 429 or answer.status >= 500:
            handled.failure = "upstream_error"
        kind = answer.headers.get("Content-Type", "application/json")
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
        await response.prepare(handled.request)
        try:
            async for piece in answer.content.iter_any():
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    raise _Torn(_too_long(call))
                pieces.append(piece)
                await response.write(piece)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _Torn(str(error)) from error
    return response, b"".join(pieces).decode(errors="replace")


def _too_long(call: ProxiedCall) -> str:
    limit = call.setting("max_response_mib", "the limit of MiB")
    return f"its response is larger than {limit}, {call.route.role.max_response_mib:g}"


def _url(request: web.Request, call: ProxiedCall) -> URL:
    """Return the URL of the call on the other server, with the path of its route here.

    The server's URL may end in /v1, as OpenAI's clients have it. Gemini's and Ollama's paths begin
    in its place. The agent can set only a model name in the path, and only one that stays within
    the path. Raise ApiError for other names. Credentials in the query are ours and are left out.
    """
    route = request.match_info.route.resource
    assert route is not None, "calls come by routes"
    path = route.canonical.removeprefix("/rollout/{rollout_url}")
    if call.model_in_path:
        name = call.route.role.served_model
        model = quote(name, safe="") if name else _checked(request.match_info["model"])
        method = request.match_info["method"]  # the route allows only a few
        path = f"{path.partition('{')[0]}{model}:{method}"
    base = URL(call.route.role.served_by)
    root = base.raw_path.rstrip("/").removesuffix("/v1")
    query = [pair for pair in request.query.items() if pair[0].lower() not in CREDENTIALS]
    return base.with_path(root + path, encoded=True).with_query(query)


def _checked(model: str) -> str:
    """Return the model name as part of a path. Raise ApiError if it could be more than that."""
    segments = model.split("/")
    if all(MODEL_SEGMENT.fullmatch(segment) and segment.strip(".") for segment in segments):
        return model
    raise invalid(
        f"model is {brief(model)}; use only letters, digits and . _ @ : + - in each segment, and "
        "no segment of only dots.",
        "model",
    )


@dataclass(frozen=True)
class RemoteEngine:
    """Stand-in for the engine of a gateway that answers no calls itself.

    `remote_routing` forwards all calls, or samplers answer them, whose statistics `counters`
    returns.
    """

    model_name: str
    serve: ServeConfig = field(default_factory=ServeConfig)
    tokenizer: Tokenizer = field(default_factory=tiny_tokenizer)  # never reads a prompt
    version: int = 0
    status: LoopStatus = "ok"
    num_slots: int = 0
    counters: Callable[[], dict[str, float]] = dict

    def start(self, num_requests: int = 1) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def stats(self) -> dict[str, float]:
        return self.counters()

    async def prepare(self, grammar: str, owner: str = "") -> None:
        self.submit()

    def submit(self, *_: Any, **__: Any) -> NoReturn:
        raise EngineError("no model is loaded; another server answers all calls.")


def remote_role(url: str, api_key: str | None = None, model: str | None = None) -> RoleConfig:
    """Return the role of calls that the server at `url` answers, with the model `model`.

    If `model` is None, the server gets the name that the agent asks for. Raises ConfigError for an
    unusable URL.
    """
    try:
        role = RoleConfig(
            agent="*", trains=False, served_by=url, served_model=model, api_key=api_key or None
        )
    except FieldError:
        role = None
    if role is None or not role.is_external:
        raise ConfigError.invalid(
            "url",
            f"the URL is {url!r}; expected the http(s) URL of an OpenAI-compatible server, such as "
            "http://localhost:8000/v1, without a user, query or fragment.",
        )
    return role


def remote_routing(roles: Roles, server: RoleConfig) -> Routing:
    """Return the routing that sends to `server` all calls that a policy would answer."""

    def sent_away(role: RoleConfig) -> RoleConfig:
        if role.is_external:
            return role
        patterns = {name: getattr(role, name) for name in ("agent", "model", "system", "message")}
        return replace(server, **patterns)

    return Routing({name: sent_away(role) for name, role in roles.items()}, fallback=server)
