"""Calls that another server answers, because their role says so: passed on as they are, both ways.

They leave a span with what was sent and what came back, and no tokens: they cannot train.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer
from yarl import URL

from lightning_jax.config import RoleConfig
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import Body
from lightning_jax.gateway.request import named_agent
from lightning_jax.tracing import attributes as names
from lightning_jax.tracing.otlp import clip
from lightning_jax.tracing.tracer import end_with_error, known

PASSED_ON = ("accept", "anthropic-version", "anthropic-beta", "openai-beta")


class _Torn(ConnectionError):
    """The answer broke off after its beginning had been sent on."""


def said_by(body: Body, path: Mapping[str, str], headers: Mapping[str, str]) -> dict[str, str]:
    """`agent`, `model` and `system` prompt of a call, in whatever dialect it is."""
    model = body.get("model") or path.get("model") or ""
    metadata = body.get("metadata")
    agent = named_agent(str(model), headers, metadata if isinstance(metadata, Mapping) else None)
    return {"agent": agent, "model": str(model), "system": _system(body)}


@dataclass(frozen=True)
class FarCall:
    """A call that another server answers."""

    body: Body
    said: Mapping[str, str]
    role_name: str
    role: RoleConfig
    rollout_id: str | None
    timeout_s: float | None
    parent: Context  # where its span belongs
    model_in_path: bool = False  # as Gemini's clients have it, instead of in the body

    @property
    def sent(self) -> Body:
        """What the server is asked."""
        named = self.role.served_model and not self.model_in_path
        return self.body | ({"model": self.role.served_model} if named else {})

    @property
    def attributes(self) -> dict[str, Any]:
        return known(
            {
                names.OPERATION_NAME: names.CHAT,
                names.ROLLOUT_ID: self.rollout_id,
                names.REQUEST_MODEL: self.role.served_model or self.said["model"] or None,
                names.POLICY: self.said["model"],
                names.AGENT: self.said["agent"],
                names.ROLE: self.role_name,
                names.SERVED_BY: self.role.served_by,
                names.INPUT: clip(json.dumps(self.sent, ensure_ascii=False)),
            }
        )


async def pass_on(
    request: web.Request, call: FarCall, tracer: Tracer, on_failure: Callable[[], None]
) -> web.StreamResponse:
    """The other server's answer, as it comes; `on_failure` runs before one that says that the
    server failed. Raises ApiError where it gives none.
    """
    span = tracer.start_span(
        f"{names.CHAT} {call.said['model']}",
        context=call.parent,
        kind=SpanKind.CLIENT,
        attributes=call.attributes,
        start_time=time.time_ns(),
    )
    try:
        response, answer = await _exchange(request, call, on_failure)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = f"{call.role.served_by} gave no answer ({type(error).__name__}: {error})"
        end_with_error(span, "upstream_error", reason)
        if isinstance(error, _Torn):
            raise
        expected = f"expected the server of role {call.role_name!r}. Start it, or set its URL."
        raise ApiError(
            502, "upstream_error", f"{reason}; {expected}", infrastructure=True
        ) from error
    except BaseException:
        end_with_error(span, "call_cancelled", "the caller hung up before the answer was done")
        raise
    span.set_attribute(names.OUTPUT, clip(answer))
    if response.status >= 400:
        end_with_error(span, f"upstream_{response.status}", answer[:500])
    else:
        span.end()
    await response.write_eof()  # now that the call is on record
    return response


async def _exchange(
    request: web.Request, call: FarCall, on_failure: Callable[[], None]
) -> tuple[web.StreamResponse, str]:
    """(the response, sent on but for its end; its text)."""
    headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
    if key := call.role.api_key:
        headers |= {"Authorization": f"Bearer {key}", "x-api-key": key, "x-goog-api-key": key}
    limit = aiohttp.ClientTimeout(total=call.timeout_s)
    pieces: list[bytes] = []
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(_url(request, call), json=call.sent, headers=headers) as answer,
    ):
        if answer.status == 429 or answer.status >= 500:
            on_failure()
        kind = answer.headers.get("Content-Type", "application/json")
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
        await response.prepare(request)
        try:
            async for piece in answer.content.iter_any():
                pieces.append(piece)
                await response.write(piece)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _Torn(str(error)) from error
    return response, b"".join(pieces).decode(errors="replace")


def _url(request: web.Request, call: FarCall) -> URL:
    """The request's path on the other server, whose URL may end in /v1 as clients' URLs do; without
    the key that some clients put there, which is ours.
    """
    path, role = request.rel_url.raw_path, call.role
    if path.startswith("/rollout/"):
        path = "/" + path.split("/", 3)[3]
    if call.model_in_path and role.served_model:
        model = quote(role.served_model, safe="")
        path = re.sub(r"(?<=/models/).+(?=:\w+$)", lambda _: model, path, count=1)
    base = role.served_by.rstrip("/")
    if base.endswith("/v1") and path.startswith("/v1/"):
        base = base.removesuffix("/v1")
    query = {name: value for name, value in request.query.items() if name != "key"}
    return URL(base + path, encoded=True).update_query(query)


def _system(body: Body) -> str:
    """The text of the system prompt, wherever a dialect puts it."""
    parts = [body.get("system"), body.get("instructions"), body.get("systemInstruction")]
    for field in ("messages", "input"):
        messages = body.get(field)
        if isinstance(messages, list):
            parts += [
                message.get("content")
                for message in messages
                if isinstance(message, Mapping) and message.get("role") in ("system", "developer")
            ]
    return "\n".join(text for part in parts if (text := _text(part)))


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "\n".join(map(_text, part))
    if isinstance(part, Mapping):
        return _text(part.get("text") or part.get("parts") or part.get("content"))
    return ""
