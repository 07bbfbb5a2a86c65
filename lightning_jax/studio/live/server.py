"""HTTP server of the live page: its files, its JSON API and its security headers.

The page shows texts of models and tools. It runs no script but its own files, may connect to no
other host, and sets texts as text. A server without a key answers only under names of this machine,
so that a web page elsewhere cannot read it through a name of its own (DNS rebinding). In the
process of a training it has threads of its own, and takes a bounded share of their time.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import math
import mimetypes
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from aiohttp import web

from lightning_jax.errors import InvalidValue, UserError
from lightning_jax.gateway.http.server import Handler, is_key, key_of
from lightning_jax.gateway.sessions.open_rollouts import ReadActivity
from lightning_jax.studio.live import answers
from lightning_jax.studio.live.catalog import Catalog, WatchedRun
from lightning_jax.studio.live.lanes import (
    RATE,
    REFUSED_S,
    SHARE,
    Allowance,
    Encoded,
    Lane,
    SharedAnswers,
    encode,
    too_busy,
)
from lightning_jax.studio.live.overview import Throughput
from lightning_jax.studio.live.watch import Watch
from lightning_jax.studio.page import ASSETS
from lightning_jax.traces.listing import Filter, Order

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
MISSING = ("not_found", "incomplete", "unknown_run", "unknown_rollout", "not_opened")
DEFAULT_PAGE = 50
MAX_NAMES = 40  # metrics in one answer
MAX_CLIENTS = 64  # that listen for changes
MAX_STREAMS = 4  # downloads at once
MAX_WAITING = 64  # requests for answers
MAX_WAITING_IN_TRAINING = 16
MAX_LONG_WAITING = 4  # searches and downloads


class LiveServer:
    """Routes of the live page over a catalog of runs. With a key, the API asks for it.

    `activity` is that of the server of the run if the catalog is this one run, which trains in this
    process. The page then takes no more than its share of it.
    """

    def __init__(
        self, catalog: Catalog, key: str | None = None, activity: ReadActivity | None = None
    ) -> None:
        self._catalog, self._key, self._activity = catalog, key, activity
        self._throughput, self._num_streams = Throughput(), 0
        threads, share, waiting = (
            (2, math.inf, MAX_WAITING) if activity is None else (1, SHARE, MAX_WAITING_IN_TRAINING)
        )
        self._requests = None if activity is None else Allowance(RATE, 2 * RATE)
        self.lane = Lane("answers", threads, waiting, share)
        # One search or download at a time, so that none delays answers.
        self.long_lane = Lane("long", 1, MAX_LONG_WAITING, share)
        self.watch, self.answers = Watch(catalog, self.lane), SharedAnswers(self.lane)

    def application(self) -> web.Application:
        """Return an application for a server of its own, or to add below a path of another."""
        app = web.Application(middlewares=[secure, self._guard, errors], client_max_size=2**16)
        get, files = app.router.add_get, _read_files()
        get("/", partial(_file, files))
        get("/api/events", self._events)
        get("/api/runs", partial(self._answer, lambda _: answers.runs_answer(self._catalog)))
        get("/api/runs/{run}/live", self._live)
        get("/api/runs/{run}/search", self._search)
        get("/api/compare", partial(self._answer, self._compare))
        run = "/api/runs/{run}"
        for path, answer in (
            ("", lambda request, run: answers.run_answer(run)),
            ("/metrics", _metrics),
            ("/groups", _groups),
            ("/groups/{group}", _of("group", answers.group_answer)),
            ("/groups/{group}/texts", _of("group", answers.group_texts_answer)),
            ("/rollouts", _rollouts),
            ("/rollouts/{rollout}", _of("rollout", answers.rollout_answer)),
        ):
            get(run + path, partial(self._answer_of_run, answer))
        pages = partial(self._page, lambda request, run: answers.run_page(run, _filter(request)))
        get(run + "/page.html", pages)
        page = partial(self._page, _of("rollout", answers.rollout_page))
        get(run + "/rollouts/{rollout}/page.html", page)
        get(run + "/rollouts.jsonl", self._jsonl)
        get("/{file:.+}", partial(_file, files))
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        await self.watch.close()
        self.lane.close()
        self.long_lane.close()
        await asyncio.to_thread(self._catalog.close)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.watch.num_clients >= MAX_CLIENTS:
            raise too_busy("too many clients")
        return await self.watch.follow(request, HEADERS)

    async def _answer(
        self, answer: Callable[[web.Request], Any], request: web.Request
    ) -> web.StreamResponse:
        """Answer with JSON that a thread computes, or that another request has just got."""
        encoded = await self.answers.get(request.path_qs, lambda: answer(request))
        return _json(encoded, request)

    async def _answer_of_run(
        self, answer: Callable[[web.Request, WatchedRun], Any], request: web.Request
    ) -> web.StreamResponse:
        return await self._answer(lambda _: answer(request, self._run(request)), request)

    def _run(self, request: web.Request) -> WatchedRun:
        return self._catalog.run(request.match_info["run"])

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Answer with what runs now. The server's own counters are read in its thread."""
        run, activity = self._run(request), self._activity and self._activity()
        server = activity and self._throughput.observe(activity)
        rollouts = activity.rollouts if activity and activity.num_slots else None
        return await self._answer(lambda _: answers.live_answer(run, server, rollouts), request)

    async def _search(self, request: web.Request) -> web.StreamResponse:
        """Search transcripts, one search at a time."""
        run, query, cursor = self._run(request), _filter(request), _number(request, "cursor", None)
        if not query.text:
            raise _wrong("text", "", "a text to search for")
        text, query = query.text, replace(query, text="")
        encoded = await self.long_lane.run(
            lambda: encode(answers.search_answer(run, text, query, cursor))
        )
        return _json(encoded, request)

    def _compare(self, request: web.Request) -> Any:
        """Compare groups of runs. A group's runs have dots between their keys."""
        groups = [group.split(".") for group in request.query.getall("group", [])]
        return answers.compare_answer([[self._catalog.run(key) for key in keys] for keys in groups])

    async def _page(
        self, render: Callable[[web.Request, WatchedRun], str], request: web.Request
    ) -> web.StreamResponse:
        run = self._run(request)
        page = await self.long_lane.run(lambda: render(request, run))
        return web.Response(
            text=page, content_type="text/html", headers=_attachment("rollouts.html")
        )

    async def _jsonl(self, request: web.Request) -> web.StreamResponse:
        """Send all matching rollouts as JSON lines, without holding them all in memory."""
        run, query = self._run(request), _filter(request)
        headers = {"Content-Type": "application/jsonl"} | _attachment("rollouts.jsonl")
        response = web.StreamResponse(headers=headers | HEADERS)
        if self._num_streams >= MAX_STREAMS:
            raise too_busy("too many downloads")
        self._num_streams += 1
        try:
            parts = await self.long_lane.run(partial(answers.jsonl_keys, run, query))
            await response.prepare(request)
            for keys in parts:
                read = partial(answers.jsonl_lines, run, keys)
                await response.write(await self.long_lane.run(read, is_admitted=True))
            await response.write_eof()
        finally:
            self._num_streams -= 1
        return response

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse the API to requests without the key, and without a key to other host names."""
        if self._key is None and not _is_local_name(request.host):
            raise web.HTTPForbidden(reason="open the page as 127.0.0.1 or localhost")
        if "/api/" not in request.path:
            return await handler(request)
        if self._key is not None and not is_key(key_of(request), self._key):
            raise web.HTTPUnauthorized(reason="the key is missing or wrong")
        if self._requests is not None:
            if self._requests.amount() < 1:
                await asyncio.sleep(REFUSED_S)
                raise too_busy("too many requests")
            self._requests.take(1.0)
        return await handler(request)


def page_of(directory: Path, key: str, activity: ReadActivity) -> web.Application:
    """Return the live page of one run, for the run's own server, which reports its activity."""
    return LiveServer(Catalog([directory]), key, activity).application()


# The page's own files


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by path, which are sent from memory: body and ETag."""
    paths = {path.relative_to(ASSETS).as_posix(): path for path in ASSETS.rglob("*")}
    bodies = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    return {name: (body, hashlib.sha256(body).hexdigest()[:16]) for name, body in bodies.items()}


async def _file(files: Mapping[str, tuple[bytes, str]], request: web.Request) -> web.StreamResponse:
    name = request.match_info.get("file", "index.html")
    if name not in files:
        raise web.HTTPNotFound
    body, etag = files[name]
    has_it = any(tag.value == etag for tag in request.if_none_match or ())
    response = web.Response(
        status=304 if has_it else 200,
        body=None if has_it else body,
        content_type=mimetypes.guess_type(name)[0] or "text/plain",
        charset="utf-8",
    )
    response.etag = etag
    return response


# Requests


def _metrics(request: web.Request, run: WatchedRun) -> Any:
    names = [name for name in request.query.get("names", "").split(",") if name]
    return answers.metrics_answer(run, names[:MAX_NAMES])


def _groups(request: web.Request, run: WatchedRun) -> Any:
    order: Any = request.query.get("order", "task")
    if order not in get_args(Order):
        raise _wrong("order", order, ", ".join(get_args(Order)))
    return answers.groups_answer(run, _filter(request), order, **_page_of(request))


def _rollouts(request: web.Request, run: WatchedRun) -> Any:
    return answers.rollouts_answer(run, _filter(request), **_page_of(request))


def _of(
    name: str, answer: Callable[[WatchedRun, str], Any]
) -> Callable[[web.Request, WatchedRun], Any]:
    """Return an answer about one thing of a run, which the address names."""
    return lambda request, run: answer(run, request.match_info[name])


def _filter(request: web.Request) -> Filter:
    query = request.query
    return Filter(
        phase=query.get("phase") or None,
        step=_number(request, "step", None),
        status=query.get("status") or None,
        group_id=query.get("group") or None,
        text=query.get("text", "")[:200],
    )


def _page_of(request: web.Request) -> dict[str, int]:
    limit, offset = _number(request, "limit", DEFAULT_PAGE), _number(request, "offset", 0)
    return {"limit": min(max(limit or 1, 1), answers.MAX_PAGE), "offset": max(offset or 0, 0)}


def _number(request: web.Request, name: str, default: int | None) -> int | None:
    text = request.query.get(name)
    if not text:
        return default
    try:
        return max(min(int(text), 2**31), -(2**31))
    except ValueError:
        raise _wrong(name, text, "a whole number") from None


def _wrong(name: str, value: str, expected: str) -> InvalidValue:
    return InvalidValue.invalid(name, f"{name} is {value[:50]!r}; expected {expected}.")


def _json(encoded: Encoded, request: web.Request) -> web.Response:
    body, headers = encoded.body, {"Cache-Control": "no-store"}
    if encoded.zipped is not None and "gzip" in request.headers.get("Accept-Encoding", ""):
        body = encoded.zipped
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return web.Response(body=body, content_type="application/json", headers=headers)


def _attachment(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}


def _is_local_name(host: str) -> bool:
    """Return whether a Host header names this machine: localhost, or a loopback address."""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    return False


# Answers to failures


@web.middleware
async def secure(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Add the security headers to every response, also to an error."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = _failure(error.status, "http_error", error.reason)
        if wait_s := error.headers.get("Retry-After"):
            response.headers["Retry-After"] = wait_s
    if not response.prepared:
        response.headers.update(HEADERS)
    return response


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a user error with its sentence, reason and key: 404 if something is gone, else 400."""
    try:
        return await handler(request)
    except UserError as error:
        status = 404 if error.reason in MISSING else 400
        return _failure(status, error.reason, str(error), error.key)
    except InvalidValue as error:
        return _failure(400, error.reason, str(error), error.key)
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise  # the client has left
        return _failure(404, "not_found", f"a file of the run cannot be read ({error.strerror}).")


def _failure(status: int, reason: str | None, message: str, key: str | None = None) -> web.Response:
    body = {"error": {"reason": reason, "key": key, "message": message}}
    return web.json_response(body, status=status)
