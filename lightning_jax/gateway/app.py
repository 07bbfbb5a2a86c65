"""The HTTP server: an OpenAI-compatible URL for every rollout, and one for calls outside them."""

import contextlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from aiohttp import web
from opentelemetry.trace import Tracer

from lightning_jax.config import ServeConfig
from lightning_jax.gateway.chat_request import (
    POLICY,
    ChatRequest,
    check_model,
    parse_chat,
    sampling_params,
)
from lightning_jax.gateway.chat_response import ChatReply
from lightning_jax.gateway.complete import Call, PolicyLoop, complete
from lightning_jax.gateway.errors import ApiError, GatewayError, invalid
from lightning_jax.gateway.event_stream import EventStream
from lightning_jax.gateway.render import Generated, Rendered, render
from lightning_jax.gateway.rollouts import OpenRollout, RolloutSettings, Traffic
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.serve.response import Chunk
from lightning_jax.store import Store, StoreError
from lightning_jax.tracing.tracer import make_tracer
from lightning_jax.types import LLM, Completion

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
SHUTDOWN_S = 2.0  # how long calls may go on once the gateway closes

__all__ = ["Gateway", "GatewayError", "RolloutSettings", "Traffic"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """Answers OpenAI's chat completions with the policy, and records every call that it answers.

    All its methods belong to one event loop's thread, the one that `start` ran in.
    """

    def __init__(
        self,
        loop: PolicyLoop,
        tokenizer: Tokenizer,
        store: Store,
        *,
        model_name: str,
        serve: ServeConfig,
        tracer: Tracer | None = None,
    ) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._store = store
        self._tracer = tracer or make_tracer(store)
        self._serve = serve
        self._rollouts: dict[str, OpenRollout] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""
        self.model_name = model_name
        self.api_key = serve.api_key or secrets.token_urlsafe(24)

    @property
    def url(self) -> str:
        """Where it listens, such as http://127.0.0.1:8000; known once it has started."""
        assert self._url, "the gateway has not started"
        return self._url

    async def start(self) -> None:
        """Binds the port and serves. Raises GatewayError when the address cannot be had."""
        app = web.Application(middlewares=[_openai_errors], client_max_size=MAX_BODY_BYTES)
        for prefix in ("", "/rollout/{rollout_id}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model}}", self._model)
        app.router.add_get("/healthz", self._health)
        # Cancelling the handler is how a client that hangs up frees its slot.
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._serve.host, self._serve.port).start()
        except OSError as error:
            await runner.cleanup()
            raise GatewayError(
                f"the gateway cannot listen on {self._serve.host}:{self._serve.port} "
                f"({error.strerror or error}); expected a free port of its own. Set serve.port "
                "to another one, or to 0 for any."
            ) from error
        self._runner = runner
        self._url = _reachable_url(runner.addresses[0])
        log.info("serving %s at %s", self.model_name, self._url)

    async def close(self) -> None:
        """Stops listening; calls in flight are cancelled soon after. Closing twice is allowed."""
        for rollout_id in list(self._rollouts):
            self.close_rollout(rollout_id)
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    def open_rollout(self, settings: RolloutSettings) -> LLM:
        """What the rollout's agent needs to call the policy. Raises ValueError if it is open."""
        if settings.rollout_id in self._rollouts:
            raise ValueError(f"rollout {settings.rollout_id!r} is open already; expected a new id.")
        self._rollouts[settings.rollout_id] = OpenRollout(settings)
        base_url = f"{self.url}/rollout/{quote(settings.rollout_id, safe='')}/v1"
        return LLM(base_url=base_url, api_key=self.api_key, model=POLICY)

    def close_rollout(self, rollout_id: str) -> Traffic:
        """What traffic the rollout made. Calls in flight are cancelled, later ones get a 404.

        Raises ValueError if it is not open.
        """
        rollout = self._rollouts.pop(rollout_id, None)
        if rollout is None:
            raise ValueError(
                f"rollout {rollout_id!r} is not open; expected one that open_rollout began."
            )
        return rollout.end()

    # Handlers

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self._authorize(request)
        rollout = self._find_rollout(request)
        stream = EventStream(request)
        try:
            with rollout.counted() if rollout else contextlib.nullcontext():
                return await self._answer(request, rollout, stream)
        except ApiError as error:
            if not stream.is_open:
                raise
            return await stream.fail(error)

    async def _answer(
        self, request: web.Request, rollout: OpenRollout | None, stream: EventStream
    ) -> web.StreamResponse:
        chat = parse_chat(await _read_json(request), request.headers, self.model_name)
        rendered = self._render(chat, rollout)
        call = self._call(request, chat, rendered, rollout)
        reply = ChatReply(
            response_id=call.call_id,
            created=int(time.time()),
            model=chat.model,
            prompt_ids=call.prompt_ids,
            logprobs=chat.logprobs,
            return_token_ids=chat.return_token_ids,
            include_usage=chat.include_usage,
            tokenizer=self._tokenizer,
        )
        if chat.stream:
            return await self._answer_stream(call, reply, rollout, stream)
        completions = await complete(call, self._loop, self._tracer)
        _remember(rollout, call, completions)
        return web.json_response(reply.body(completions))

    async def _answer_stream(
        self, call: Call, reply: ChatReply, rollout: OpenRollout | None, stream: EventStream
    ) -> web.StreamResponse:
        async def on_accept() -> None:
            await stream.open()
            for index in range(len(call.sampling)):
                await stream.send(reply.opening(index))

        async def on_chunk(index: int, chunk: Chunk) -> None:
            await stream.send(
                reply.piece(index, chunk.text, chunk.token_ids, chunk.behavior_logprobs)
            )

        completions = await complete(
            call, self._loop, self._tracer, on_accept=on_accept, on_chunk=on_chunk
        )
        _remember(rollout, call, completions)
        for index, completion in enumerate(completions):
            await stream.send(reply.ending(index, completion))
        if reply.include_usage:
            await stream.send(reply.usage_chunk(completions))
        return await stream.close()

    def _render(self, chat: ChatRequest, rollout: OpenRollout | None) -> Rendered:
        try:
            rendered = render(
                chat.messages, chat.tools, self._tokenizer, rollout.memory if rollout else None
            )
        except ValueError as error:
            param = "tools" if str(error).startswith("tools") else "messages"
            raise invalid(str(error), param) from error
        if rollout:
            rollout.prefix_breaks += rendered.breaks
        return rendered

    def _call(
        self,
        request: web.Request,
        chat: ChatRequest,
        rendered: Rendered,
        rollout: OpenRollout | None,
    ) -> Call:
        room = self._serve.max_len - len(rendered.token_ids)
        return Call(
            call_id=f"chatcmpl-{secrets.token_hex(12)}",
            prompt_ids=rendered.token_ids,
            sampling=sampling_params(chat, rollout, room),
            policy=chat.model,
            served_model=self.model_name,
            agent=chat.agent,
            rollout_id=rollout.settings.rollout_id if rollout else None,
            timeout_s=rollout.settings.call_timeout_s if rollout else None,
            prefix_breaks=rendered.breaks,
            headers=request.headers,
        )

    async def _models(self, request: web.Request) -> web.Response:
        self._authorize(request)
        self._find_rollout(request)
        models = [_model_entry(name) for name in dict.fromkeys((POLICY, self.model_name))]
        return web.json_response({"object": "list", "data": models})

    async def _model(self, request: web.Request) -> web.Response:
        self._authorize(request)
        self._find_rollout(request)
        name = request.match_info["model"]
        check_model(name, self.model_name)
        return web.json_response(_model_entry(name))

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "engine": self._loop.stats()})

    def _authorize(self, request: web.Request) -> None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        # In constant time, so that answers do not tell how much of a key is right.
        right = hmac.compare_digest(key.strip().encode(errors="replace"), self.api_key.encode())
        if scheme.lower() != "bearer" or not right:
            raise ApiError(
                401,
                "invalid_api_key",
                "the API key is missing or wrong; expected the gateway's as Bearer.",
            )

    def _find_rollout(self, request: web.Request) -> OpenRollout | None:
        rollout_id = request.match_info.get("rollout_id")
        if rollout_id is None:
            return None
        if rollout_id in self._rollouts:
            return self._rollouts[rollout_id]
        try:
            state = f"has ended ({self._store.rollout(rollout_id).status})"
        except StoreError:
            state = "is unknown"
        raise ApiError(
            404,
            "rollout_not_found",
            f"rollout {rollout_id!r} {state}; expected a running one. Use the base_url that the "
            "agent was started with, or /v1 for calls outside of rollouts.",
        )


async def _read_json(request: web.Request) -> object:
    try:
        return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(
            413,
            "body_too_large",
            f"the body is larger than the limit of {MAX_BODY_BYTES} bytes; send less.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON ({error}); expected a JSON object.") from error


def _remember(rollout: OpenRollout | None, call: Call, completions: tuple[Completion, ...]) -> None:
    if rollout:
        for completion in completions:
            rollout.memory.add(completion.text, Generated(call.prompt_ids, completion.token_ids))


def _model_entry(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lightning_jax"}


def _reachable_url(address: tuple) -> str:
    """The URL of a bound address; "all interfaces" is reached through the loopback."""
    host, port = str(address[0]), address[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every failure into OpenAI's error body."""
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        code = "unknown_url" if error.status == 404 else "http_error"
        failure = ApiError(error.status, code, f"{request.method} {request.path}: {error.reason}.")
    except ConnectionError:
        raise  # nobody is there to answer
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        failure = ApiError(
            500, "internal_error", f"the server failed ({type(error).__name__}); see its log."
        )
    return web.json_response(failure.body, status=failure.status, headers=failure.headers)
