"""HTTP server with a URL for every rollout, one for calls outside rollouts, and every dialect."""

import logging
import secrets
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Self
from urllib.parse import quote

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine
from lightning_jax.gateway.calls.offload import Offload
from lightning_jax.gateway.calls.record import Recorder
from lightning_jax.gateway.calls.remote import RemoteEngine
from lightning_jax.gateway.calls.responder import Responder
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.gateway.dialects.all import DIALECTS
from lightning_jax.gateway.dialects.base import Dialect, Listing
from lightning_jax.gateway.errors import ApiError, GatewayError, to_api_error
from lightning_jax.gateway.http.auth import Callers
from lightning_jax.gateway.http.handler import CallHandler
from lightning_jax.gateway.http.server import (
    Bodies,
    listen,
    local_url,
    openai_errors,
    reachable_url,
    refusal,
)
from lightning_jax.gateway.http.work_routes import WorkRoutes
from lightning_jax.gateway.metrics import Meters
from lightning_jax.gateway.prompt.habits import habits_of
from lightning_jax.gateway.prompt.tool_formats import format_of
from lightning_jax.gateway.request import POLICY
from lightning_jax.gateway.sessions.feedback import Reports
from lightning_jax.gateway.sessions.leases import LeaseQueue
from lightning_jax.gateway.sessions.open_rollouts import (
    Activity,
    OpenRollouts,
    RolloutSettings,
    Traffic,
)
from lightning_jax.gateway.sessions.waits import Lost, counted_for
from lightning_jax.system.clock import PausableClock
from lightning_jax.traces import otlp
from lightning_jax.traces.context import OpenSpan, SpanSink
from lightning_jax.traces.store import Store, TemporaryStore
from lightning_jax.types import LLM

log = logging.getLogger(__name__)

PAGE = "/studio/"  # path of the page for people, if there is one

__all__ = ["Gateway", "GatewayError", "RolloutSettings", "Traffic"]


class Gateway:
    """Server that answers every dialect with the engine and records every call in the store.

    Open it with `async with`, or call `start` and `close`. Without a store, calls go to a temporary
    one, which `close` deletes, or with `records=False` nowhere. `routing` selects the policy for
    each call, and the calls that another server answers. `serve` is by default the engine's. With
    `any_model`, the policy answers for unknown model names outside of rollouts, too. Call all
    methods in the event loop's thread that ran `start`.
    """

    def __init__(
        self,
        engine: Engine | RemoteEngine,
        store: SpanSink | None = None,
        *,
        records: bool = True,
        serve: ServeConfig | None = None,
        routing: Routing | None = None,
        any_model: bool = False,
    ) -> None:
        self._temporary = TemporaryStore() if store is None and records else None
        store = store or self._temporary
        # None: calls are recorded nowhere, or by another process.
        self.store = store if isinstance(store, Store) else None
        self.model_name = engine.model_name
        serve, tokenizer = (serve or engine.serve).with_sizes(), engine.tokenizer
        self.engine = engine
        self._meters = Meters(engine.stats)
        self.pauses = PausableClock()  # of the deadlines of calls and rollouts
        self._offload = Offload()
        self._bodies = Bodies(serve, self._offload)
        self._rollouts = OpenRollouts(store, serve, self.pauses.now_s)
        _ = tokenizer.max_token_bytes  # computed before the first call has to wait for it
        responder = Responder(
            engine=engine,
            tokenizer=tokenizer,
            recorder=Recorder(store, self._rollouts.owners, self._meters),
            served_model=self.model_name,
            serve=serve,
            tool_format=format_of(tokenizer),
            offload=self._offload,
            pauses=self.pauses,
        )
        self.api_key = serve.api_key or secrets.token_urlsafe(24)
        self._reports = Reports(store, self._rollouts.owners, self._meters)
        routing = routing or Routing()
        self._callers = Callers(self.api_key, self._rollouts, responder, routing, any_model)
        self._calls = CallHandler(self._callers, self._bodies)
        self.work = LeaseQueue()  # that others run
        self._serve = serve
        self._page: web.Application | None = None
        self._page_login = ""  # what follows the page's URL in the log
        self._runner: web.AppRunner | None = None
        self._url = self._local_url = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """URL of the server for agents, such as http://127.0.0.1:8000. Known once it has started.

        It is `serve.public_url`, or else an address that other machines reach if they may.
        """
        assert self._url, "the gateway has not started"
        return self._url

    @property
    def local_url(self) -> str:
        """URL of the server for this machine."""
        assert self._local_url, "the gateway has not started"
        return self._local_url

    async def start(self) -> None:
        """Bind the port and serve. Raise GatewayError if the address is not available."""
        on_close = partial(self._meters.count, "closed_connections")
        self._runner = await listen(self._application(), self._serve, on_close)
        address = self._runner.addresses[0]
        self._local_url = local_url(address)
        self._url = (self._serve.public_url or reachable_url(address)).rstrip("/")
        log.info("serving %s at %s", self.model_name, self._url)
        if (tokenizer := self.engine.tokenizer).template is not None:
            log.info("%s", habits_of(tokenizer).describe())
        if self._page is not None:
            log.info("look at the run at %s%s%s", self._local_url, PAGE, self._page_login)

    async def close(self) -> None:
        """Stop listening, and cancel calls in flight soon after. Closing twice is allowed."""
        self._rollouts.close_all()
        if self._runner:
            await self._runner.cleanup()
            self._runner = None
        await self._calls.close()
        self._offload.close()
        if self._temporary:
            self._temporary.close()

    def show_page(self, page: web.Application, login: str) -> None:
        """Serve this page for people below PAGE, and send a browser there. Call before `start`.

        The page checks its own key. `login` follows its URL in the log: the key as a fragment, or
        which key to enter.
        """
        self._page, self._page_login = page, login

    def open_rollout(self, settings: RolloutSettings) -> LLM:
        """Return what the rollout's agent needs to call the policy. Raise ValueError if open."""
        rollout = self._rollouts.open(settings)
        full, calls = (
            f"{self.url}/rollout/{quote(segment, safe='')}/v1"
            for segment in (rollout.url_segment, rollout.calls_segment)
        )
        owner = rollout.owner
        return LLM(full, owner.key, POLICY, calls_url=calls, calls_key=owner.calls_key)

    def root_of(self, rollout_id: str) -> OpenSpan:
        """Return the open rollout's root span."""
        return self._rollouts[rollout_id].root

    def posted_reward(self, rollout_id: str) -> float | None:
        """Return the reward posted for the open rollout, or None if there is none."""
        return self._rollouts[rollout_id].reward

    def idle_s(self, rollout_id: str) -> float:
        """Return the seconds since the open rollout's last request, 0 while it has a call."""
        return self._rollouts[rollout_id].idle_s

    def is_over(self, rollout_id: str) -> bool:
        """Return True if an open rollout gets no more answers, as after too many long prompts."""
        return self._rollouts.is_over(rollout_id)

    def over(self) -> frozenset[str]:
        """Return the ids of the root spans of all open rollouts that are over. See `is_over`."""
        return self._rollouts.over()

    def lost(self, rollout_id: str) -> Lost:
        """Return the seconds in which all the open rollout's calls in flight waited for a token."""
        return self._rollouts[rollout_id].waits.lost

    async def expire_rollout(self, rollout_id: str) -> None:
        """End the open rollout's responses at its deadline, and refuse its later calls.

        Responses that decode end as "length" with their tokens so far. Return once they are
        recorded.
        """
        await self._rollouts[rollout_id].expire()

    def close_rollout(self, rollout_id: str) -> Traffic:
        """Close a rollout and return its traffic. Raise ValueError if it is not open.

        Calls in flight are cancelled, and later ones get a 404.
        """
        traffic = self._rollouts.close(rollout_id)
        self._meters.count("forgotten_answers", traffic.num_forgotten)
        return traffic

    def stats(self) -> dict[str, float]:
        """Return counters since the start, including the engine's."""
        totals = Counter(self.engine.stats())  # an engine may stand for other gateways
        totals.update(self._meters.totals())
        return dict(totals)

    def activity(self) -> Activity:
        """Return the slots, the counters and the open rollouts of this moment."""
        return Activity(self.engine.num_slots, self.stats(), self._rollouts.activity())

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[openai_errors], client_max_size=self._bodies.max_bytes)
        by_route: dict[tuple[str, str], list[tuple[Dialect, Listing]]] = {}
        for dialect in DIALECTS:
            for listing in dialect.listings:
                by_route.setdefault((listing.method, listing.path), []).append((dialect, listing))
        for prefix in ("", "/rollout/{rollout_url}"):
            for dialect in DIALECTS:
                for path in dialect.paths:
                    app.router.add_post(prefix + path, partial(self._calls.handle, dialect))
            for (method, path), listings in by_route.items():
                app.router.add_route(method, prefix + path, partial(self._list, listings))
            app.router.add_post(f"{prefix}/v1/traces", self._spans)
        for path in ("/reward", "/v1/reward"):
            app.router.add_post("/rollout/{rollout_url}" + path, self._reward)
        WorkRoutes(self._callers, self._bodies, self.work).add_to(app)
        # Neither reveals a secret, so neither needs a key.
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
        if self._page is not None:
            app.add_subapp(PAGE, self._page)
            app.router.add_get("/", _to_page)
        return app

    async def _list(
        self, listings: list[tuple[Dialect, Listing]], request: web.Request
    ) -> web.StreamResponse:
        """Answer a listing of the first dialect whose header the request has, or else of the first
        dialect.
        """
        named = [entry for entry in listings if entry[1].header in request.headers]
        dialect, listing = next(iter(named), listings[0])
        try:
            rollout = self._callers.admit(request, dialect)
            raw = await self._bodies.read(request) if request.can_read_body else b"{}"
            body, sender = await self._bodies.json(raw), self._callers.sender(request, rollout)
            return web.json_response(
                await self._offload.run(len(raw), listing.answer, body, sender)
            )
        except ApiError as error:
            return refusal(dialect, error)

    async def _reward(self, request: web.Request) -> web.Response:
        """Record a reward for a rollout or one of its calls. The rollout's URL is the only key
        needed. With the URL for calls alone, the reward is ignored and counted.
        """
        self._callers.rollout_of(request)
        body = await self._bodies.read_json(request)
        rollout = self._callers.rollout_of(request)  # again: it may have ended in the meantime
        assert rollout is not None, "the path holds a rollout"
        should_count = self._callers.may_report(request)
        with counted_for(rollout.waits):
            return web.json_response(
                await self._reports.reward(body, rollout, should_count=should_count)
            )

    async def _spans(self, request: web.Request) -> web.Response:
        """Record spans sent over OTLP/HTTP.

        They are for the rollout whose URL or key they come with. With the gateway's key, they are
        for the rollouts that own their traces. With a URL or key for calls alone, they are ignored
        and counted.
        """
        kind = otlp.JSON if request.content_type == otlp.JSON else otlp.PROTOBUF
        rollout = self._callers.rollout_of(request)
        owner = rollout.owner if rollout else self._callers.span_owner(request)
        should_count = self._callers.may_report(request)
        waits = rollout.waits if rollout else None
        with counted_for(waits), owner.export() if owner else nullcontext():
            raw = await self._bodies.read(request)
            async with owner.turn if owner else nullcontext():
                body = await self._bodies.json(raw) if kind == otlp.JSON else raw
                try:
                    export = await self._offload.run(len(raw), otlp.read_request, body)
                except ValueError as error:
                    expected = f"{error}; expected an ExportTraceServiceRequest."
                    raise to_api_error(error, message=expected) from error
                if should_count:
                    refused = await self._reports.add_spans(export, owner)
                else:
                    refused = self._reports.ignore_spans(export, owner)
        answer = otlp.write_response(refused, export.num_dropped_attributes, kind)
        return web.Response(body=answer, content_type=kind)

    async def _health(self, request: web.Request) -> web.Response:
        """Answer a load balancer: 200 only while new calls would be answered."""
        state = {"status": self.engine.status, "engine": self.engine.stats()}
        return web.json_response(state, status=200 if self.engine.status == "ok" else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._meters.exposition(), headers=headers)


async def _to_page(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": PAGE})
