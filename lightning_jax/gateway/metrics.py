"""Counters and histograms of the gateway, for Prometheus and for the trainer's metrics."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lightning_jax.engine.types import LONGEST_WAIT
from lightning_jax.gateway.answer import Answer

HUNG_UP = 499  # the client disconnected before the answer; nginx's status for it
# Gauges: these stats also go down.
PRESENT = ("serve/running", "serve/queue_depth", "serve/open", "serve/compiling")
CALL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Counters that the trainer logs, too.
COUNTERS = {
    "prefix_breaks": "Prompts that repeat an earlier response but not its token ids.",
    "malformed_tool_calls": "Tool calls that could not be parsed and were returned as text.",
    "calls_with_parts_left_out": (
        "Calls with hosted tools, or pictures in results of tools, which the policy did not get."
    ),
    "joined_calls": "Retries that joined the call of an earlier request.",
    "late_responses": (
        "Responses that rollout.call_timeout_s or the deadline of their rollout ended as length."
    ),
    "forgotten_answers": (
        "Answers dropped because their rollout exceeded serve.max_kept_mib_per_rollout."
    ),
    "spans": "Spans that agents sent over OTLP.",
    "unknown_spans": "OTLP spans rejected because they belong to no rollout.",
    "foreign_spans": (
        "OTLP spans rejected because of another rollout's trace id or a recorded span's ids."
    ),
    "excess_spans": (
        "OTLP spans rejected because they exceed a limit of the request or the rollout."
    ),
    "dropped_attributes": (
        "Attributes dropped from OTLP spans because they were too long or too many."
    ),
    "ignored_traceparents": (
        "Calls whose traceparent was ignored: another rollout's, or above the limit of traces."
    ),
    "ignored_reports": (
        "Rewards and spans that a program posted with a URL for calls alone (agent.posts)."
    ),
    "closed_connections": (
        "Connections closed because of the connection limit, idleness or slow requests."
    ),
}


@dataclass
class CallOutcome:
    """Outcome of one call, set by its handler. The default is a failure of our own."""

    status: int = 500


class Meters:
    """Counters of one gateway, kept in their own registry."""

    def __init__(self, engine_stats: Callable[[], Mapping[str, float]]) -> None:
        self._registry = registry = CollectorRegistry()
        self._calls = Counter(
            "lightning_calls",
            f"Calls by HTTP status. A failed stream has the status of its error; {HUNG_UP} means "
            "that the client disconnected.",
            ("dialect", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "lightning_call_seconds",
            "Seconds from receiving a call to the end of its response.",
            ("dialect",),
            buckets=CALL_BUCKETS_S,
            registry=registry,
        )
        self._first_token_seconds = Histogram(
            "lightning_first_token_seconds",
            "Seconds from the start of an answered choice to its first token, including the wait "
            "for a slot.",
            ("dialect",),
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._counters = {
            name: Counter(f"lightning_{name}", text, registry=registry)
            for name, text in COUNTERS.items()
        }
        registry.register(_EngineCollector(engine_stats))

    def count(self, name: str, number: int = 1) -> None:
        """Add to one of COUNTERS."""
        if number:
            self._counters[name].inc(number)

    @contextmanager
    def call(self, dialect: str) -> Iterator[CallOutcome]:
        """Count one call and its duration in seconds, by the status that the body sets."""
        outcome, started = CallOutcome(), time.monotonic()
        try:
            yield outcome
        except (asyncio.CancelledError, ConnectionError):
            outcome.status = HUNG_UP
            raise
        finally:
            self._calls.labels(dialect, str(outcome.status)).inc()
            self._seconds.labels(dialect).observe(time.monotonic() - started)

    def answered(self, dialect: str, answers: Sequence[Answer]) -> None:
        """Record the time to the first token of each answer."""
        for answer in answers:
            waited_ns = answer.clock.first_token_ns - answer.clock.started_ns
            self._first_token_seconds.labels(dialect).observe(waited_ns / 1e9)

    def totals(self) -> dict[str, float]:
        """Return the counters that the trainer logs, as totals since the start."""
        read = self._registry.get_sample_value
        return {f"serve/{name}": read(f"lightning_{name}_total") or 0.0 for name in COUNTERS}

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Collector that reads the engine's counters on every scrape."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        for key, value in self._stats().items():
            name, text = f"lightning_{key.replace('/', '_')}", f"The engine's {key}."
            is_gauge = key in PRESENT or key == LONGEST_WAIT
            kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
            yield kind(name, text, value=value)
