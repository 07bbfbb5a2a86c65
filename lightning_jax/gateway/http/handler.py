"""HTTP handler of calls to the policy, with answers in the caller's dialect."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO

from aiohttp import web

from lightning_jax.errors import brief
from lightning_jax.gateway.calls.offload import INLINE_BYTES, FairQueue, dump_json
from lightning_jax.gateway.calls.record import IncomingCall
from lightning_jax.gateway.calls.remote import ProxiedCall, pass_on
from lightning_jax.gateway.calls.routing import Route
from lightning_jax.gateway.dialects.all import read_traits
from lightning_jax.gateway.dialects.base import Dialect, Dump, Event, Framing, Reply, Sender
from lightning_jax.gateway.errors import ApiError, our_fault
from lightning_jax.gateway.fields import Body
from lightning_jax.gateway.http.auth import Callers
from lightning_jax.gateway.http.server import Bodies, refusal
from lightning_jax.gateway.metrics import HUNG_UP
from lightning_jax.gateway.request import is_accepted, is_policy
from lightning_jax.gateway.sessions.open_rollouts import HandledCall, OpenRollout
from lightning_jax.gateway.sessions.running_calls import RunningCall, identity_of, is_repetition
from lightning_jax.system.descriptors import lacks_resources

log = logging.getLogger(__name__)

PIECE_BYTES = 64 * 2**10  # written at once
# Header of an answer: kinds of tools and content that the policy did not get.
LEFT_OUT = "X-Left-Out"
KEEP_ALIVE_S = 10.0  # without news, after which a stream says that its call goes on
MAX_WARNINGS = 100  # of such kinds, for all rollouts together


class EventStream:
    """Stream of events to a client. Nothing is sent before `open`."""

    def __init__(self, request: web.Request, framing: Framing) -> None:
        self._request = request
        self._framing = framing
        self._separator = framing.begin
        self._num_events = 0
        self._held = b""
        self._num_unpaused = 0  # bytes written since others could run
        self._written_s = time.monotonic()  # when the last events were written
        self.response = web.StreamResponse(
            headers={"Content-Type": framing.content_type, "Cache-Control": "no-cache"}
        )

    @property
    def is_open(self) -> bool:
        return self.response.prepared

    @property
    def silent_s(self) -> float:
        """Seconds since the last events were sent."""
        return time.monotonic() - self._written_s

    async def open(self) -> None:
        await self.response.prepare(self._request)

    def hold(self, events: Iterable[Event], dump: Dump = json.dumps) -> None:
        """Buffer the events and send them with the next ones, or at the end."""
        for event in events:
            if self._framing.numbered:
                event["sequence_number"] = self._num_events
                self._num_events += 1
            self._held += self._separator + self._framing.frame(event, dump)
            self._separator = self._framing.between

    async def send(self, events: Iterable[Event]) -> None:
        """Send the events, if any. Raise ConnectionError if the client disconnected."""
        self.hold(events)
        await self.flush()

    async def flush(self) -> None:
        """Send what is held, if anything. Raise ConnectionError if the client disconnected."""
        if self._held:
            await self._write()
            self._written_s = time.monotonic()

    async def close(self) -> web.StreamResponse:
        """Send what is held and the end-of-stream mark, and return the finished response."""
        return await self._end(self._framing.end + self._framing.close)

    async def fail(self, event: Event) -> web.StreamResponse:
        """End the stream with an error event, because its status is already sent."""
        self.hold([event])
        return await self._end(self._framing.close)

    async def _end(self, mark: bytes) -> web.StreamResponse:
        if len(self._held) > PIECE_BYTES:
            await self._write()
        data, self._held = self._held, b""
        await self.response.write_eof(data + mark)
        return self.response

    async def _write(self) -> None:
        """Write what is held, and let others run after every few kilobytes.

        A client that begins to read again, or joins a call, has thousands of events waiting.
        """
        data, self._held = self._held, b""
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            await self.response.write(piece)
            self._num_unpaused += len(piece)
            if self._num_unpaused > INLINE_BYTES:
                self._num_unpaused = 0
                await asyncio.sleep(0)


class CallHandler:
    """Handler that answers calls in every dialect."""

    def __init__(self, callers: Callers, bodies: Bodies) -> None:
        self._callers = callers
        self._routing = callers.routing
        self._recorder = callers.responder.recorder
        self._meters = self._recorder.meters
        self._bodies = bodies
        self._turns = FairQueue()
        self._has_noted_model = False
        self._left_out: set[str] = set()  # kinds that are logged, outside of rollouts
        self._num_warnings = 0
        self.working: set[asyncio.Task] = set()  # tasks of calls, which may outlive their requests

    async def close(self) -> None:
        """Cancel the calls that are still running."""
        for task in self.working:
            task.cancel()
        await asyncio.gather(*self.working, return_exceptions=True)

    async def handle(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Return the answer to one call, or its error, in the dialect's format."""
        stream = EventStream(
            request, dialect.framings.get(request.query.get("alt", ""), dialect.framing)
        )
        with self._meters.call(dialect.name) as outcome:
            try:
                await self._turns.wait(request.match_info.get("rollout_url", ""))
                rollout = self._callers.admit(request, dialect)
                call = HandledCall(request, rollout)
                counted = rollout.counted(call) if rollout else contextlib.nullcontext()
                with counted, _our_fault(call):
                    response = await self._answer(dialect, call, stream)
                outcome.status = response.status
                return response
            except ApiError as error:
                outcome.status = error.status
                error = error.named(dialect.names)
                if not stream.is_open:
                    return refusal(dialect, error)
                with contextlib.suppress(ConnectionError):
                    await stream.fail((dialect.error_event or dialect.error)(error))
            except ConnectionError:  # the client disconnected
                if not stream.is_open:
                    raise
                outcome.status = HUNG_UP
            return stream.response

    async def _answer(
        self, dialect: Dialect, call: HandledCall, stream: EventStream
    ) -> web.StreamResponse:
        request, rollout = call.request, call.rollout
        raw = await self._bodies.read(request)
        call.identity = await self._bodies.offload.run(
            len(raw), identity_of, request.path, raw, request.headers
        )
        body, sender = await self._bodies.json(raw), self._callers.sender(request, rollout)
        route = Route()
        if self._routing:
            traits = read_traits(body, request.match_info, request.headers)
            route = self._routing.route(**traits)
        if route.role.is_external:
            return await self._pass_on(dialect, call, route, body, len(raw))
        if dialect.at_once and (ready := dialect.at_once(body, sender)) is not None:
            return web.json_response(ready)
        reply = await self._bodies.offload.run(len(raw), dialect.parse, body, sender)
        self._note_model(reply.request.model, sender, rollout)
        left_out = self._note_left_out(reply.request.left_out, rollout)
        stream.response.headers.update(left_out)
        incoming = IncomingCall(
            rollout=rollout,
            route=route,
            request=reply.request,
            headers=request.headers,
            num_bytes=len(raw),
        )
        running = call.running = self._find(call) or self._start(call, incoming)

        def keep() -> bool:
            # A client does not retry a response that it has begun to read.
            return rollout is not None and not stream.is_open and call.will_be_sent_again

        with running.listen(keep):
            if reply.request.stream:
                return await self._stream(running, reply, stream, len(raw))
            answers = await running.answers()
            reply.begin(running.context)
            num_bytes = reply.num_bytes(answers, len(raw))
            dump = _dump(num_bytes)
            text = await self._bodies.offload.run(
                num_bytes, lambda: dump(reply.body(answers)).encode()
            )
            # A file is sent in pieces.
            body = text if len(text) <= PIECE_BYTES else BytesIO(text)
            return web.Response(
                body=body, content_type="application/json", charset="utf-8", headers=left_out
            )

    async def _stream(
        self, running: RunningCall, reply: Reply, stream: EventStream, request_bytes: int
    ) -> web.StreamResponse:
        await running.accepted()
        reply.begin(running.context)
        await stream.open()
        opening_bytes = reply.num_bytes((), request_bytes)
        await self._hold(stream, opening_bytes, reply.opening)
        await stream.flush()  # clients give up on a stream without events
        async for delta in running.deltas(KEEP_ALIVE_S):
            if delta is not None:
                await stream.send(reply.delta(delta))
            if delta is None or stream.silent_s > KEEP_ALIVE_S:  # or its tokens show nothing yet
                await self._hold(stream, opening_bytes, reply.keep_alive)
                await stream.flush()
        answers = await running.answers()
        num_bytes = reply.num_bytes(answers, request_bytes)
        await self._hold(stream, num_bytes, lambda: reply.ending(answers))
        return await stream.close()

    async def _hold(
        self, stream: EventStream, num_bytes: int, events: Callable[[], Iterable[Event]]
    ) -> None:
        """Buffer events of roughly `num_bytes`."""
        dump = _dump(num_bytes)
        await self._bodies.offload.run(num_bytes, lambda: stream.hold(events(), dump))

    def _note_model(self, model: str, sender: Sender, rollout: OpenRollout | None) -> None:
        """Log the first unknown model name that the policy answers for."""
        is_known = not model or is_policy(model) or is_accepted(model, sender.known)
        if not (is_known or self._has_noted_model):
            self._has_noted_model = True
            log.info(
                "an agent asked for model %s; the policy answers in its place, as for any unknown "
                "name (%s)",
                brief(model),
                "serve.strict_models=true refuses them" if rollout else "--any-model",
                extra={"event": "model_substituted", "model": model},
            )

    def _note_left_out(self, kinds: Sequence[str], rollout: OpenRollout | None) -> dict[str, str]:
        """Return the answer's header for what the policy does not get of a request, if anything.

        Log each kind once in a rollout, and count the calls.
        """
        self._meters.count("calls_with_parts_left_out", int(bool(kinds)))
        logged = rollout.left_out if rollout else self._left_out
        fresh = sorted({*kinds} - logged)
        logged.update(fresh)
        if fresh and self._num_warnings < MAX_WARNINGS:
            self._num_warnings += 1
            log.warning(
                "left %s out of the requests of %s, because the policy reads only text and has "
                "none of a provider's own tools%s",
                ", ".join(fresh),
                f"rollout {rollout.settings.rollout_id}" if rollout else "a client",
                "; further ones are not logged" if self._num_warnings == MAX_WARNINGS else "",
                extra={"event": "left_out", "kinds": fresh},
            )
        return {LEFT_OUT: ", ".join(dict.fromkeys(kinds))} if kinds else {}

    def _find(self, call: HandledCall) -> RunningCall | None:
        """Return the running call that the request repeats, or None if it is a new one."""
        if call.rollout is None or not is_repetition(call.request.headers):
            return None
        running = call.rollout.calls.find(call.identity)
        self._meters.count("joined_calls", int(running is not None))
        return running

    def _start(self, call: HandledCall, incoming: IncomingCall) -> RunningCall:
        """Start a call, so that requests that repeat it can join it at once."""
        self._routing.check(incoming.route)
        running = self._callers.responder.start(incoming)
        self.working.add(running.task)
        running.task.add_done_callback(self.working.discard)
        if call.rollout:
            call.rollout.calls.add(call.identity, running)
        return running

    async def _pass_on(
        self, dialect: Dialect, call: HandledCall, route: Route, body: Body, num_bytes: int
    ) -> web.StreamResponse:
        request, rollout = call.request, call.rollout
        served_model, model_in_path = route.role.served_model, "model" in request.match_info
        if served_model and not model_in_path:
            body = body | {"model": served_model}
        dump = partial(dump_json, ensure_ascii=False)
        proxied = ProxiedCall(
            rollout=rollout,
            route=route,
            sent=await self._bodies.offload.run(num_bytes, dump, body),
            span=self._recorder.begin(request.headers, rollout),
            dialect=dialect.name,
            model_in_path=model_in_path,
        )
        return await pass_on(call, proxied, self._recorder)


@contextlib.contextmanager
def _our_fault(call: HandledCall) -> Iterator[None]:
    """Turn an unexpected error into a 500 response.

    It is an infrastructure failure once the engine has accepted the call, or if the system ran out
    of resources. Before that only the agent's own request was read, and a retry would send it
    unchanged.
    """
    try:
        yield
    except (ApiError, ConnectionError, web.HTTPException):
        raise
    except Exception as error:
        log.exception("a call failed")
        short = isinstance(error, OSError) or lacks_resources(error)
        raise our_fault(error, infrastructure=call.reached_engine or short) from error


def _dump(num_bytes: int) -> Dump:
    """Return the function that writes JSON of about this length."""
    return json.dumps if num_bytes <= INLINE_BYTES else dump_json  # the same text
