"""Tests of the client against a collector that takes, rejects, redirects, hangs or never ends."""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from opentelemetry import context
from otlp_collector import Collector, open_collector, values_of

from lightning_jax.traces import attributes
from lightning_jax.train.sinks.otlp_client import EXPORTER, MAX_ANSWER, OtlpClient, clean
from lightning_jax.types import Span

pytest.importorskip(EXPORTER, reason="of the extra otlp")

SPANS = [
    Span("a" * 32, "b" * 16, None, "invoke_agent", 1_000, 5_000, {"lightning.step": 3}),
    Span(
        "a" * 32,
        "c" * 16,
        "b" * 16,
        "chat policy",
        2_000,
        3_000,
        {attributes.POLICY: "policy", "gen_ai.response.finish_reasons": ("stop",)},
        error="half \ud800 a pair",
    ),
]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with open_collector() as place:
        yield place


@pytest.fixture
def client(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpClient]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=9")
    made = OtlpClient(f"{collector.url}/v1/traces", {"authorization": "Bearer k"}, "mine")
    yield made
    made.close()


def test_a_collector_gets_ids_parents_times_and_attributes(
    client: OtlpClient, collector: Collector
) -> None:
    assert client.send(SPANS) == (2, "")
    root, call = collector.spans
    assert (root.trace_id.hex(), root.span_id.hex(), root.parent_span_id) == (
        "a" * 32,
        "b" * 16,
        b"",
    )
    assert (call.trace_id, call.parent_span_id) == (root.trace_id, root.span_id)
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (1_000, 5_000)
    assert values_of(root) == {"lightning.step": 3}
    assert values_of(call)["gen_ai.response.finish_reasons"] == ["stop"]
    assert (root.kind, call.kind) == (root.SPAN_KIND_INTERNAL, root.SPAN_KIND_CLIENT)
    assert (root.status.code, call.status.code) == (0, 2)
    assert call.status.message == "half ? a pair"
    assert collector.resource()["service.name"] == "lightning_jax"
    assert collector.resource()["lightning.run"] == "mine"
    assert collector.paths == ["/v1/traces"]
    assert collector.headers[0]["authorization"] == "Bearer k"
    assert collector.headers[0]["x-tenant"] == "9"


def test_rejected_spans_are_told(client: OtlpClient, collector: Collector) -> None:
    collector.num_rejected = 1
    assert client.send(SPANS) == (1, "full")
    collector.num_rejected = 99
    assert client.send(SPANS) == (0, "full")


@pytest.mark.parametrize("status", [307, 400, 500, 503])
def test_no_other_answer_counts_as_taken(
    client: OtlpClient, collector: Collector, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status, collector.location = status, "/elsewhere"
    number, reason = client.send(SPANS)
    assert number == 0 and reason
    assert caplog.records == []  # the exporter's own lines are the reason


def test_a_collector_that_hangs_costs_the_timeout(client: OtlpClient, collector: Collector) -> None:
    collector.goes_on.clear()
    started = time.monotonic()
    assert client.send(SPANS)[0] == 0
    assert time.monotonic() - started < 5


def test_a_collector_that_is_down_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    client = OtlpClient("http://127.0.0.1:1/v1/traces", {}, "mine")
    number, reason = client.send(SPANS)
    assert number == 0 and "127.0.0.1" in reason
    assert reason == "127.0.0.1:1: Connection refused"
    client.close()


def test_close_ends_a_wait_before_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    client = OtlpClient("http://127.0.0.1:1/v1/traces", {}, "mine")
    threading.Timer(0.3, client.close).start()
    started = time.monotonic()
    assert client.send(SPANS)[0] == 0
    assert time.monotonic() - started < 10


def test_an_endless_answer_is_read_only_so_far(client: OtlpClient, collector: Collector) -> None:
    collector.is_endless = True
    assert client.send(SPANS)[0] == 2
    assert len(client._answer.body) <= MAX_ANSWER


def test_lines_of_an_agents_exporter_are_logged(
    client: OtlpClient, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(f"{EXPORTER}.trace_exporter")
    with client._kept_log():
        logger.error("ours")
        theirs = threading.Thread(target=logger.error, args=("theirs",))
        theirs.start()
        theirs.join()
    logger.error("later")
    assert [record.getMessage() for record in caplog.records] == ["theirs", "later"]


def test_instrumentation_of_http_does_not_trace_the_requests(
    client: OtlpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, seen = requests.Session.send, list[object]()

    def instrumented(*arguments: Any, **kwargs: Any) -> requests.Response:
        seen.append(context.get_value("suppress_instrumentation"))
        return send(*arguments, **kwargs)

    monkeypatch.setattr(requests.Session, "send", instrumented)
    monkeypatch.setattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")
    assert client.send(SPANS)[0] == 2
    assert seen == [True]
    assert context.get_value("suppress_instrumentation") is None


def test_values_that_protobuf_refuses_are_changed() -> None:
    assert clean((2**70, -(2**70), True, 5)) == (float(2**70), -float(2**70), True, 5)
    assert clean({"a": ["\udc00", None], 1: 0.5}) == {"a": ("?", ""), "1": 0.5}
    assert clean(10**400) == 1e308
