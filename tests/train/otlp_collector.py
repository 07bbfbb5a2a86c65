"""OTLP collector of tests, over HTTP, that can misbehave."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PROTOBUF = "application/x-protobuf"


class Collector:
    """Spans, paths and headers that were sent, and how the collector answers.

    `status` is that of each answer. It rejects `num_rejected` spans of each request. It answers no
    request while `is_hanging`, and only after `delay_s`. `endless` bodies never end.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.status, self.num_rejected, self.location = 200, 0, ""
        self.is_endless, self.delay_s = False, 0.0
        self.goes_on = threading.Event()
        self.goes_on.set()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, Any]:
        return values_of(self.requests[0].resource_spans[0].resource)

    def roots(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of the roots by rollout id."""
        roots = [values_of(span) for span in self.spans if not span.parent_span_id]
        return {values["lightning.rollout_id"]: values for values in roots}

    def below(self, root: Span) -> list[Span]:
        return [s for s in self.spans if s.trace_id == root.trace_id and s.parent_span_id]


def values_of(record: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource."""
    return {pair.key: _value(pair.value) for pair in record.attributes}


def _value(value: AnyValue) -> Any:
    match kind := value.WhichOneof("value"):
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return {item.key: _value(item.value) for item in value.kvlist_value.values}
        case None:
            return None
    return getattr(value, kind)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        place: Collector = self.server.place  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        place.goes_on.wait(60)
        time.sleep(place.delay_s)
        answer = ExportTraceServiceResponse()
        if place.status == 200:
            place.requests.append(ExportTraceServiceRequest.FromString(body))
            place.paths.append(self.path)
            place.headers.append({name.lower(): value for name, value in self.headers.items()})
            if place.num_rejected:
                answer.partial_success.rejected_spans = place.num_rejected
                answer.partial_success.error_message = "full"
        try:
            self.send_response(place.status)
            if place.location:
                self.send_header("Location", place.location)
            self.send_header("Content-Type", PROTOBUF)
            if place.is_endless:
                self.end_headers()
                while place.is_endless:
                    self.wfile.write(b"\0" * 4096)
            else:
                text = answer.SerializeToString()
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
        except OSError:  # the client hung up
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def open_collector() -> Iterator[Collector]:
    """Yield a collector that listens until the end."""
    place = Collector()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.place = place  # type: ignore[attr-defined]
    place.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield place
    finally:
        place.is_endless = False
        place.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
