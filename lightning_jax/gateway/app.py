"""The HTTP server: a URL for every rollout, one for calls outside of them, and every dialect."""

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from urllib.parse import quote

from aiohttp import web
from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CONTENT_TYPE_LATEST

from lightning_jax.config import ServeConfig
from lightning_jax.gateway.complete import PolicyLoop
from lightning_jax.gateway.conversations import SavedConversations
from lightning_jax.gateway.dialects.all import DIALECTS
from lightning_jax.gateway.dialects.base import Dialect, Listing, Reply, Sender
from lightning_jax.gateway.elsewhere import FarCall, pass_on, said_by
from lightning_jax.gateway.errors import ApiError, GatewayError, invalid
from lightning_jax.gateway.event_stream import EventStream
from lightning_jax.gateway.fields import Body
from lightning_jax.gateway.http import (
    MAX_BODY_BYTES,
    as_json,
    check_exposure,
    key_of,
    openai_errors,
    reachable_url,
    read_body,
    refusal,
)
from lightning_jax.gateway.meters import Meters
from lightning_jax.gateway.policy import Policy
from lightning_jax.gateway.reports import Reports
from lightning_jax.gateway.request import POLICY
from lightning_jax.gateway.rollouts import OpenRollout, RolloutSettings, Traffic
from lightning_jax.gateway.routing import NOTHING_SAID, Routing
from lightning_jax.gateway.running import (
    RunningCall,
    declared_timeout_s,
    identity_of,
    is_repetition,
)
from lightning_jax.gateway.tool_formats import format_of
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.store import Store
from lightning_jax.store_file import StoreError
from lightning_jax.tracing import otlp
from lightning_jax.tracing.tracer import make_tracer
from lightning_jax.types import LLM

log = logging.getLogger(__name__)

SHUTDOWN_S = 2.0  # how long calls may go on once the gateway closes

__all__ = ["Gateway", "GatewayError", "RolloutSettings", "Traffic"]


class Gateway:
    """Answers every dialect with the policy, and records every call in the store.

    Without a store or a tracer calls are answered and leave no record. `routing` says which calls
    the loop `initial` or another server answers instead of `loop`, and which of its policies does.
    All its methods belong to one event loop's thread, the one that `start` ran in.
    """

    def __init__(
        self,
        loop: PolicyLoop,
        tokenizer: Tokenizer,
        store: Store | None,
        *,
        model_name: str,
        serve: ServeConfig,
        tracer: Tracer | None = None,
        routing: Routing | None = None,
        initial: PolicyLoop | None = None,
    ) -> None:
        self._loop = loop
        self._meters = Meters(loop.stats)
        self._tracer = tracer or (make_tracer(store) if store else NoOpTracer())
        self._policy = Policy(
            loop=loop,
            tokenizer=tokenizer,
            tracer=self._tracer,
            served_model=model_name,
            max_len=serve.max_len,
            tool_format=format_of(tokenizer),
            meters=self._meters,
        )
        self._routing = routing or Routing()
        self._sources = {"policy": self._policy}  # by a role's `served_by`
        if initial is not None:
            self._sources["initial"] = replace(self._policy, loop=initial)
        self._store = store
        self._reports = Reports(store)
        self._serve = serve
        self._rollouts: dict[str, OpenRollout] = {}
        self._conversations = SavedConversations()
        self._working: set[asyncio.Task] = set()
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
        check_exposure(self._serve)
        app = web.Application(middlewares=[openai_errors], client_max_size=MAX_BODY_BYTES)
        for prefix in ("", "/rollout/{rollout_url}"):
            for dialect in DIALECTS:
                for path in dialect.paths:
                    app.router.add_post(prefix + path, partial(self._post, dialect))
            for (method, path), listings in _listings().items():
                app.router.add_route(method, prefix + path, partial(self._list, listings))
            app.router.add_post(f"{prefix}/v1/traces", self._spans)
        for path in ("/reward", "/v1/reward"):
            app.router.add_post("/rollout/{rollout_url}" + path, self._reward)
        # Neither says a secret, so neither asks for a key.
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
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
        self._url = reachable_url(runner.addresses[0])
        log.info("serving %s at %s", self.model_name, self._url)

    async def close(self) -> None:
        """Stops listening; calls in flight are cancelled soon after. Closing twice is allowed."""
        for rollout_id in [rollout.settings.rollout_id for rollout in self._rollouts.values()]:
            self.close_rollout(rollout_id)
        if self._runner:
            await self._runner.cleanup()
            self._runner = None
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)

    def open_rollout(self, settings: RolloutSettings) -> LLM:
        """What the rollout's agent needs to call the policy. Raises ValueError if it is open."""
        if settings.rollout_id in self._rollouts:
            raise ValueError(f"rollout {settings.rollout_id!r} is open already; expected a new id.")
        rollout = OpenRollout(settings)
        self._rollouts[settings.rollout_id] = rollout
        self._reports.expect(settings.rollout_id)
        place = quote(f"{settings.rollout_id}~{rollout.token}", safe="")
        return LLM(f"{self.url}/rollout/{place}/v1", self.api_key, POLICY)

    def posted_reward(self, rollout_id: str) -> float | None:
        """What was posted as the open rollout's reward, None if nothing was."""
        return self._rollouts[rollout_id].reward

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

    def stats(self) -> dict[str, float]:
        """Counters since the start, the engine's among them."""
        return self._loop.stats() | self._meters.totals()

    # Handlers

    async def _post(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """One call to the policy."""
        framing = dialect.framings.get(request.query.get("alt", ""), dialect.framing)
        stream = EventStream(request, framing)
        with self._meters.call(dialect.name) as outcome:
            try:
                self._authorize(request, dialect)
                rollout = self._find_rollout(request)
                with rollout.counted() if rollout else contextlib.nullcontext():
                    response = await self._answer(dialect, request, rollout, stream)
                outcome.status = response.status
                return response
            except ApiError as error:
                outcome.status = error.status
                if stream.is_open:
                    return await stream.fail(dialect.error_event(error))
                return refusal(dialect, error)

    async def _answer(
        self,
        dialect: Dialect,
        request: web.Request,
        rollout: OpenRollout | None,
        stream: EventStream,
    ) -> web.StreamResponse:
        started = time.monotonic()
        raw = await read_body(request)
        body, sender = as_json(raw), self._sender(request, rollout)
        said = NOTHING_SAID
        if self._routing:
            said = said_by(body, request.match_info, request.headers)
        role_name, role = self._routing.role_of(said)
        if role.is_elsewhere:
            return await self._pass_on(request, body, rollout, role_name, said)
        if dialect.at_once and (ready := dialect.at_once(body, sender)) is not None:
            return web.json_response(ready)
        parsed, make_reply = dialect.parse(body, sender)
        identity = identity_of(request.path, raw, request.headers)
        running = None
        if rollout and is_repetition(request.headers):
            running = rollout.calls.find(identity)
        if rollout and running:
            rollout.num_joined += 1
            self._meters.joined_calls.inc()
        else:
            part, source = self._routing.part_of(said), self._sources[role.served_by]
            running = source.start(parsed, rollout, request.headers, part)
            self._track(running)
            if rollout:
                rollout.calls.add(identity, running)
                self._reports.expect(rollout.settings.rollout_id, request.headers)
        patience = declared_timeout_s(request.headers)

        def keep() -> bool:  # the client gave up on time, and will ask again
            waited = time.monotonic() - started
            return rollout is not None and patience is not None and waited >= 0.95 * patience

        with running.listen(keep):
            reply = make_reply(running.context)
            if parsed.stream:
                return await _stream(running, reply, stream)
            return web.json_response(reply.body(await running.answers()))

    async def _pass_on(
        self,
        request: web.Request,
        body: Body,
        rollout: OpenRollout | None,
        role_name: str,
        said: Mapping[str, str],
    ) -> web.StreamResponse:
        """Has another server answer, because the call's role says so."""

        def on_failure() -> None:
            if rollout:
                rollout.errors["upstream_error"] += 1

        call = FarCall(
            body,
            said,
            role_name,
            self._routing.roles[role_name],
            rollout.settings.rollout_id if rollout else None,
            rollout.settings.call_timeout_s if rollout else None,
        )
        return await pass_on(request, call, self._tracer, on_failure)

    def _track(self, running: RunningCall) -> None:
        """Keeps hold of the call's task, which may outlive the request."""
        self._working.add(running.task)
        running.task.add_done_callback(self._working.discard)

    async def _list(
        self, listings: list[tuple[Dialect, Listing]], request: web.Request
    ) -> web.StreamResponse:
        """What is served, in the terms of the first dialect whose header the request has."""
        named = [found for found in listings if found[1].header in request.headers]
        dialect, listing = next(iter(named), listings[0])
        try:
            self._authorize(request, dialect)
            rollout = self._find_rollout(request)
            body = as_json(await read_body(request)) if request.can_read_body else {}
            return web.json_response(listing.answer(body, self._sender(request, rollout)))
        except ApiError as error:
            return refusal(dialect, error)

    async def _reward(self, request: web.Request) -> web.Response:
        """A reward for a rollout or one of its calls. The rollout's URL is all the key it takes."""
        rollout = self._find_rollout(request)
        assert rollout is not None, "the path holds a rollout"
        body = as_json(await read_body(request))
        return web.json_response(self._reports.reward(body, rollout))

    async def _spans(self, request: web.Request) -> web.Response:
        """Spans over OTLP/HTTP: of one rollout, or of those that their traces belong to."""
        kind = otlp.JSON if request.content_type == otlp.JSON else otlp.PROTOBUF
        rollout = self._find_rollout(request)
        if rollout is None:
            self._authorize(request, DIALECTS[0])
        try:
            spans = otlp.read_request(await read_body(request), kind)
        except ValueError as error:
            raise invalid(f"{error}; expected an ExportTraceServiceRequest.") from error
        owner = rollout.settings.rollout_id if rollout else None
        num_unknown = self._reports.add_spans(spans, owner)
        self._meters.spans.inc(len(spans) - num_unknown)
        self._meters.unknown_spans.inc(num_unknown)
        answer = otlp.write_response(num_unknown, "their traces belong to no rollout", kind)
        return web.Response(body=answer, content_type=kind)

    async def _health(self, request: web.Request) -> web.Response:
        """What a load balancer asks: 200 only while new calls would be answered."""
        state = {"status": self._loop.status, "engine": self._loop.stats()}
        return web.json_response(state, status=200 if self._loop.status == "ok" else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._meters.exposition(), headers=headers)

    def _sender(self, request: web.Request, rollout: OpenRollout | None) -> Sender:
        return Sender(
            headers=request.headers,
            path=request.match_info,
            query=request.query,
            model_name=self.model_name,
            conversations=rollout.conversations if rollout else self._conversations,
            max_len=self._serve.max_len,
            count_tokens=partial(self._policy.count_tokens, rollout=rollout),
            other_models=tuple(r.model for r in self._routing.roles.values() if r.model),
            policies=tuple(self._routing.policies),
        )

    def _authorize(self, request: web.Request, dialect: Dialect) -> None:
        key = key_of(request)
        if key is None and dialect.open_in_rollouts and "rollout_url" in request.match_info:
            return
        # In constant time, so that answers do not tell how much of a key is right.
        right = hmac.compare_digest((key or "").encode(errors="replace"), self.api_key.encode())
        if not right:
            raise ApiError(
                401,
                "invalid_api_key",
                "the API key is missing or wrong; expected the gateway's, as Bearer in the "
                "Authorization header or as your client sends it.",
            )

    def _find_rollout(self, request: web.Request) -> OpenRollout | None:
        place = request.match_info.get("rollout_url")
        if place is None:
            return None
        rollout_id, _, token = place.rpartition("~")
        rollout = self._rollouts.get(rollout_id)
        if rollout and hmac.compare_digest(token.encode(), rollout.token.encode()):
            return rollout
        ended = None
        with contextlib.suppress(StoreError):
            if self._store and rollout is None:
                ended = self._store.rollout(rollout_id).status
        state = f"has ended ({ended})" if ended else "is unknown"
        raise ApiError(
            404,
            "rollout_not_found",
            f"rollout {rollout_id or place!r} {state}; expected a running one. Use the base_url "
            "that the agent was started with, or /v1 for calls outside of rollouts.",
        )


def _listings() -> dict[tuple[str, str], list[tuple[Dialect, Listing]]]:
    """The listings of each method and path."""
    found: dict[tuple[str, str], list[tuple[Dialect, Listing]]] = {}
    for dialect in DIALECTS:
        for listing in dialect.listings:
            found.setdefault((listing.method, listing.path), []).append((dialect, listing))
    return found


async def _stream(running: RunningCall, reply: Reply, stream: EventStream) -> web.StreamResponse:
    await running.accepted()
    await stream.open()
    await stream.send(reply.opening())
    async for delta in running.deltas():
        await stream.send(reply.delta(delta))
    await stream.send(reply.ending(await running.answers()))
    return await stream.close()
