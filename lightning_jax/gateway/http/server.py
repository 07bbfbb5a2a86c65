"""HTTP parts of the server: bodies, keys, errors and addresses."""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import json
import logging
import re
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from aiohttp import web
from aiohttp.web import RequestPayloadError

from lightning_jax.engine.config import ServeConfig
from lightning_jax.errors import brief
from lightning_jax.gateway.calls.offload import Offload
from lightning_jax.gateway.dialects.base import Dialect
from lightning_jax.gateway.errors import ApiError, GatewayError, invalid, our_fault
from lightning_jax.gateway.fields import Body, as_object, has_more_values, has_surrogates
from lightning_jax.gateway.http.connections import GuardedRunner
from lightning_jax.gateway.http.server_log import server_logger

log = logging.getLogger(__name__)

# A client that finds the accept queue full waits a second before it tries again.
BACKLOG = 512
MAX_ACCEPTED = 32  # connections in one iteration of the event loop; each takes up to 0.4 ms
MAX_WORDS = 8  # of a path that is compared with those of the server
SHUTDOWN_S = 2.0  # how long calls may continue once the gateway closes

_ANY_HEADER = zlib.MAX_WBITS | 32  # gzip or zlib
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Bodies:
    """Reader of request bodies, within `serve.max_body_mib` and `serve.max_json_values`.

    Both limit how long C code holds the interpreter lock. All other work on a long body runs in a
    thread.
    """

    serve: ServeConfig
    offload: Offload

    @property
    def max_bytes(self) -> int:
        return int(self.serve.max_body_mib * 2**20)

    async def read(self, request: web.Request) -> bytes:
        """Return the decompressed body. Raise ApiError if it is too large or broken."""
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise self._too_large() from error
        except RequestPayloadError as error:
            raise invalid(
                f"the body could not be read ({error}); send it again.", reason="unreadable"
            ) from error
        coding = request.headers.get("Content-Encoding", "").strip().lower()
        if coding in ("", "identity") or not raw:
            return raw
        # A small body may decompress to any size up to the limit.
        return await self.offload.run(self.max_bytes, self._unpacked, raw, coding)

    async def read_json(self, request: web.Request) -> Body:
        """Return the body as a JSON object. Raise ApiError like `read` and `json`."""
        return await self.json(await self.read(request))

    async def json(self, raw: bytes) -> Body:
        """Return the body as a JSON object. Raise ApiError if it is not one or is too large."""
        return await self.offload.run(len(raw), self.as_json, raw)

    def as_json(self, raw: bytes) -> Body:
        """Return the body as a JSON object, without a thread. Raise ApiError like `json`."""
        limit = self.serve.max_json_values
        if has_more_values(raw, limit):
            raise ApiError(
                413,
                "body_too_large",
                f"the body has more than {limit} names and values; send fewer, or raise "
                "serve.max_json_values.",
                key="serve.max_json_values",
            )
        try:
            body = as_object(json.loads(raw.decode("utf-8-sig")))
            # Half of a surrogate pair cannot be encoded, rendered or stored.
            if (b"\\ud" in raw or b"\\uD" in raw) and has_surrogates(body):
                raise ValueError("it holds half of a surrogate pair")
        except (ValueError, RecursionError) as error:
            raise invalid(
                f"the body is not JSON ({error}); expected a JSON object.", reason="malformed"
            ) from error
        return body

    def _unpacked(self, packed: bytes, coding: str) -> bytes:
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise ApiError(
                415,
                "unsupported_encoding",
                f"Content-Encoding is {brief(coding)}; expected gzip, deflate or none.",
            )
        has_header = coding != "deflate" or packed[0] & 0x0F == zlib.DEFLATED
        unpacker = zlib.decompressobj(_ANY_HEADER if has_header else -zlib.MAX_WBITS)
        try:
            unpacked = unpacker.decompress(packed, self.max_bytes + 1)
        except zlib.error as error:
            raise invalid(
                f"the body is not valid {coding} ({error}).", reason="unreadable"
            ) from error
        if len(unpacked) > self.max_bytes:
            raise self._too_large()
        if not unpacker.eof or unpacker.unused_data:
            raise invalid(f"the body is not one complete {coding} stream.", reason="unreadable")
        return unpacked

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            "body_too_large",
            f"the body is larger than the limit of {self.max_bytes} bytes; send less, or raise "
            "serve.max_body_mib.",
            key="serve.max_body_mib",
        )


def key_of(request: web.Request) -> str | None:
    """Return the API key, wherever a dialect's clients put it, or None if there is none."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    for header in ("x-api-key", "x-goog-api-key"):
        if header in request.headers:
            return request.headers[header]
    return request.query.get("key")


def refusal(dialect: Dialect, error: ApiError) -> web.Response:
    """Return the error in the format of the dialect."""
    return web.json_response(dialect.error(error), status=error.status, headers=error.headers)


async def listen(
    app: web.Application, serve: ServeConfig, on_close: Callable[[], None] = lambda: None
) -> web.AppRunner:
    """Bind the port and serve. Raise GatewayError if the address is not available.

    `on_close` is called for each connection that is closed to make room or for being slow.
    """
    check_exposure(serve)
    # Cancelling the handler frees the slot of a client that disconnects.
    runner = GuardedRunner(
        app,
        serve,
        on_close,
        handler_cancellation=True,
        access_log=None,
        logger=server_logger(),
        shutdown_timeout=SHUTDOWN_S,
        auto_decompress=False,  # `Bodies` decompresses, in a thread and within limits
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, serve.host, serve.port, backlog=MAX_ACCEPTED)
        await site.start()
        _lengthen_queue(site)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        await runner.cleanup()
        raise _unavailable(serve, error) from error
    return runner


def _unavailable(serve: ServeConfig, error: OSError | UnicodeError) -> GatewayError:
    """Return the error for an address that cannot be bound: its port, or else its host, is bad."""
    number = error.errno if isinstance(error, OSError) else None
    words = (error.strerror if isinstance(error, OSError) else None) or error
    of_port = {
        errno.EADDRINUSE: "to a free port, or to 0 for any",
        errno.EACCES: "to 1024 or above, or to 0 for any free one",
    }
    key, fix = "serve.port", f"set serve.port or --port {of_port.get(number or 0)}"
    if number not in of_port:
        key = "serve.host"
        fix = (
            "set serve.host or --host to a name or an address of this machine, without scheme and "
            "port, such as 127.0.0.1, or 0.0.0.0 for all"
        )
    return GatewayError(
        f"the server cannot listen on {serve.host}:{serve.port} ({words}); {fix}.",
        reason="address_unavailable",
        key=key,
    )


def _lengthen_queue(site: web.TCPSite) -> None:
    """Set the length of the accept queue to `BACKLOG`.

    asyncio takes one number for both this length and the connections accepted at once. aiohttp
    does not give its server, so the private attribute is read.
    """
    server: asyncio.Server | None = site._server  # type: ignore[assignment]
    assert server is not None, "the site has not been started"
    for listening in server.sockets:
        with listening.dup() as copy:
            copy.listen(BACKLOG)


async def check_address(serve: ServeConfig) -> None:
    """Raise GatewayError if the address is not available. Leave it free otherwise."""
    runner = await listen(web.Application(), serve)
    await runner.cleanup()


def check_exposure(serve: ServeConfig) -> None:
    """Raise GatewayError if other machines can reach the address and no key is set."""
    if not serve.api_key and is_exposed(serve.host):
        raise GatewayError.missing(
            "serve.api_key",
            f"serve.host is {serve.host!r}, which other machines can reach, but serve.api_key is "
            "not set; set serve.api_key, or leave serve.host at 127.0.0.1.",
        )


def is_exposed(host: str) -> bool:
    """Return whether other machines can reach a server that listens on this host."""
    try:
        infos = socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):  # then listening fails, too
        return False
    addresses = {str(address[0]).partition("%")[0] for *_, address in infos}
    return not all(ipaddress.ip_address(address).is_loopback for address in addresses)


def is_key(candidate: str | None, key: str) -> bool:
    """Compare keys in constant time, so that response times reveal nothing of the right one."""
    return hmac.compare_digest((candidate or "").encode(errors="replace"), key.encode())


def local_url(address: tuple) -> str:
    """Return the URL of a bound address for this machine: loopback if it is bound to all."""
    host, port = str(address[0]), address[1]
    return _url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def reachable_url(address: tuple) -> str:
    """Return the URL of a bound address for other machines, if they can reach it.

    An address that is bound to all interfaces becomes the one that this machine's own connections
    to other networks would have, or loopback if it has no network.
    """
    host, port = str(address[0]), address[1]
    return _url(_outgoing(host), port) if host in _OUTSIDE else local_url(address)


# Addresses outside of any network, by the wildcard address of their family.
_OUTSIDE = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}


def _outgoing(wildcard: str) -> str:
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_OUTSIDE[wildcard], 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "::1" if ":" in wildcard else "127.0.0.1"


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    """Return the error for a request that no handler took.

    Clients that ask for a WebSocket first (Codex) go on with HTTP at a 426, and repeat it at a 405.
    """
    if error.status == 405 and request.headers.get("Upgrade", "").lower() == "websocket":
        text = f"{request.method} {request.path}: there are no WebSockets here; use POST."
        return ApiError(426, "upgrade_required", text)
    code = "unknown_url" if error.status == 404 else "http_error"
    fix = await _fix(request, error)
    text = f"{request.method} {request.path}: {error.reason}{fix and f'; {fix}'}."
    return ApiError(error.status, code, text)


async def _fix(request: web.Request, error: web.HTTPException) -> str:
    """Return what to do about a URL that does not exist, or "" if nobody can tell."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"use {' or '.join(sorted(error.allowed_methods))}"
    if error.status != 404:
        return ""
    with contextlib.suppress(RuntimeError, ValueError):  # its body is read, or it is no URL
        for path in _similar_paths(request.path):
            meant = request.clone(rel_url=request.rel_url.with_path(path))
            if (await request.app.router.resolve(meant)).http_exception is None:
                return f"did you mean {path}? Correct the base URL that the client has"
    is_below = "/v1/" in f"{request.path}/"
    return "" if is_below else "the API is below /v1, so base URLs of OpenAI's clients end in /v1"


def _similar_paths(path: str) -> Iterator[str]:
    """Yield paths with /v1 added or left out, and without what a base URL has too much."""
    words = [word for word in path.split("/") if word][:MAX_WORDS]
    rollout, words = (words[:2], words[2:]) if words[:1] == ["rollout"] else ([], words)
    tails = [words[start:] for start in range(len(words))]
    heads = [words[:end] for end in range(len(words) - 1, 0, -1)]
    for part in (*tails, *heads):
        for prefix in ([], ["v1"]):
            yield "/" + "/".join([*rollout, *prefix, *part])


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors that no dialect has answered into OpenAI's error body."""
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        failure = await _http_error(request, error)
    except ConnectionError:
        raise  # the client has disconnected
    except Exception as error:
        # Without the rollout's token, which is the only credential that some of its calls need.
        path = re.sub(r"~[^/]*", "", request.path)
        log.exception(
            "%s %s failed",
            request.method,
            path,
            extra={"event": "request_failed", "path": path},
        )
        failure = our_fault(error)
    return web.json_response(failure.body, status=failure.status, headers=failure.headers)
