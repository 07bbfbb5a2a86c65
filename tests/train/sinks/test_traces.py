"""Tests that finished rollouts are sent as traces. A bad collector costs only its spans."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded
from log_events import records
from otlp_collector import Collector, open_collector, values_of

from lightning_jax.errors import FieldError
from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.settings import ConfigError, load_config, save_config
from lightning_jax.testing.records import sequence, trajectory, transition
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces import attributes
from lightning_jax.traces.config import TracesConfig
from lightning_jax.traces.store import Store, TemporaryStore
from lightning_jax.train.config import Config
from lightning_jax.train.hook import UpdateInput
from lightning_jax.train.sinks import otlp_client, traces
from lightning_jax.train.sinks.otlp_client import EXPORTER, check_traces
from lightning_jax.train.sinks.traces import (
    TracedRollouts,
    TraceExport,
    agent_name,
    batches,
    endpoint_of,
    numbers_of,
)
from lightning_jax.types import Rollout, Span

pytest.importorskip(EXPORTER, reason="of the extra otlp")

SENT, LOST = "train/trace_spans_sent", "train/trace_spans_lost"


@pytest.fixture
def store() -> Iterator[Store]:
    with closing(TemporaryStore()) as made:
        yield made


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with open_collector() as place:
        yield place


def _finished(store: Store, name: str, num_calls: int = 2) -> Rollout:
    """Add a scored rollout to the store, with a root and some calls."""
    rollout = Rollout(name, "t", "g", "eval", 0, 0, 1, "queued")
    store.add_rollout(rollout, {"id": "t", "question": "1 + 1"})
    store.set_status(name, "running")
    trace = f"{abs(hash(name)) + 1:032x}"
    of_call: dict[str, Any] = {
        attributes.POLICY: "policy",
        attributes.PROMPT_TOKEN_IDS: (1, 2),
        attributes.RESPONSE_TOKEN_IDS: (3,),
        attributes.ROLLOUT_ID: name,
    }
    for index in range(num_calls):
        store.add_span(name, Span(trace, f"{index + 2:016x}", f"{1:016x}", "chat", 2, 3, of_call))
    root = {attributes.ROLLOUT_ID: name}
    store.add_span(name, Span(trace, f"{1:016x}", None, "rollout", 1, 4, root))
    store.set_status(name, "scored", 1.0)
    return store.rollout(name)


def _export(store: Store, url: str, **settings: Any) -> TraceExport:
    return TraceExport(
        TracesConfig(export=url, **settings), store, tiny_tokenizer(), "agent.py:run"
    )


def _wait_for(export: TraceExport, name: str, number: float) -> None:
    deadline = time.monotonic() + 20
    while export.counts()[name] < number:
        assert time.monotonic() < deadline, export.counts()
        time.sleep(0.01)


def test_rollouts_arrive_with_their_tasks_and_texts(store: Store, collector: Collector) -> None:
    export = _export(store, collector.url)
    export.send([_finished(store, "a"), _finished(store, "b")])
    export.close()
    assert export.counts() == {SENT: 6.0, LOST: 0.0}
    assert len(collector.requests) == 1  # one batch
    assert collector.roots().keys() == {"a", "b"}
    (root, _) = (span for span in collector.spans if not span.parent_span_id)
    assert values_of(root)["input.value"] == '{"question": "1 + 1"}'
    calls = collector.below(root)
    assert len(calls) == 2
    assert {call.parent_span_id for call in calls} == {root.span_id}
    assert "gen_ai.output.messages" in values_of(calls[0])


def test_content_can_stay_at_home(store: Store, collector: Collector) -> None:
    export = _export(store, collector.url, content=False)
    export.send([_finished(store, "a")])
    export.close()
    sent = [values_of(span) for span in collector.spans]
    assert not {key for values in sent for key in values if "messages" in key or "value" in key}
    assert len(sent) == 3


def test_large_rollouts_take_several_requests(store: Store, collector: Collector) -> None:
    export = _export(store, collector.url)
    export.send([_finished(store, "a", traces.MAX_SPANS + 5), _finished(store, "b")])
    export.close()
    sizes = [len(request.resource_spans[0].scope_spans[0].spans) for request in collector.requests]
    assert sizes == [traces.MAX_SPANS, 6, 3]


def test_a_full_collector_costs_what_it_rejects(
    store: Store, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.num_rejected = 1
    export = _export(store, collector.url)
    export.send([_finished(store, "a")])
    export.close()
    assert export.counts() == {SENT: 2.0, LOST: 1.0}
    assert records(caplog, "traces_failed")[0].reason == "full"
    assert records(caplog, "traces_lost")[0].number == 1


def test_a_collector_that_fails_is_told_once_and_the_next_spans_are_tried(
    store: Store, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 500
    export = _export(store, collector.url)
    for number, name in enumerate("abc", start=1):
        export.send([_finished(store, name)])
        _wait_for(export, LOST, 3.0 * number)
    collector.status = 200
    export.send([_finished(store, "d")])
    _wait_for(export, SENT, 3.0)
    export.close()
    assert export.counts() == {SENT: 3.0, LOST: 9.0}
    assert len(records(caplog, "traces_failed")) == 1


def test_a_hanging_collector_holds_up_neither_rollouts_nor_the_end(
    store: Store, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MAX_WAITING", 7)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    collector.goes_on.clear()
    export = _export(store, collector.url, close_s=0.2)
    rollouts = [_finished(store, name) for name in "abcde"]
    started = time.monotonic()
    for rollout in rollouts:
        export.send([rollout])
    assert export.counts()[LOST] == 9.0  # two rollouts wait
    export.close()
    assert time.monotonic() - started < 5
    assert export.counts() == {SENT: 0.0, LOST: 15.0}


def test_the_end_does_not_wait_for_a_collector_that_is_down(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    export = _export(store, "http://127.0.0.1:1", close_s=60)
    export.send([_finished(store, "a")])
    _wait_for(export, LOST, 3.0)
    started = time.monotonic()
    export.send([_finished(store, "b")])
    export.close()
    assert time.monotonic() - started < 5
    assert export.counts()[LOST] == 6.0


def test_training_rollouts_are_sent_with_the_advantages_of_their_step(
    store: Store, collector: Collector
) -> None:
    export = _export(store, collector.url)
    hook = TracedRollouts(export)
    good, bad = (_finished(store, name, 1) for name in "ab")
    call = replace(transition([1, 2], [3], reward=0.25), call_id=f"{2:016x}")
    kept = replace(sequence([1, 2], [3]), response_token_ids=call.response_token_ids)
    update = UpdateInput(
        [replace(kept, advantage=0.5)],
        [trajectory(call, rollout="a")],
    )
    hook.after_rollouts(0, [good], {})
    hook.after_rollouts(0, [good, bad], {})  # another round
    assert hook.before_update(0, update) == (update.sequences, {})
    hook.before_update(1, update)  # a step of a warm-up has no rollouts
    export.close()
    assert collector.roots()["a"]["lightning.advantage"] == 0.5
    assert export.counts()[SENT] == 4.0


def test_advantages_of_tokens_become_their_mean() -> None:
    first, second = (transition([1], tokens) for tokens in ([3, 4], [5]))
    first, second = replace(first, call_id="a", reward=0.5), replace(second, call_id="b")
    update = UpdateInput(
        [
            replace(
                sequence([1], [3, 4]),
                response_token_ids=first.response_token_ids,
                advantage=(1.0, 2.0),
            )
        ],
        [trajectory(first, second)],
    )
    assert numbers_of(update) == {
        "a": {attributes.REWARD: 0.5, attributes.ADVANTAGE: 1.5},
        "b": {},  # it does not train
    }


def test_requests_have_bounded_texts() -> None:
    long = Span("a" * 32, "b" * 16, None, "s", 0, 1, {"x": "y" * (traces.MAX_CHARS // 2)})
    nested = replace(long, attributes={"x": ({"k": "y" * traces.MAX_CHARS}, 1)})
    assert [len(batch) for batch in batches([long, long, nested, long])] == [1, 1, 1, 1]
    assert [len(batch) for batch in batches([replace(long, attributes={})] * 3)] == [3]


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:6006", "http://127.0.0.1:6006/v1/traces"),
        ("http://127.0.0.1:6006/", "http://127.0.0.1:6006/v1/traces"),
        ("https://a.b/api/public/otel/v1/traces", "https://a.b/api/public/otel/v1/traces"),
        ("env", None),
    ],
)
def test_the_path_for_traces_is_added(url: str, endpoint: str | None) -> None:
    assert endpoint_of(TracesConfig(export=url)) == endpoint


def test_the_variables_name_the_collector(
    store: Store, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises_coded(ConfigError, "missing", "traces.export"):
        check_traces(TracesConfig(export="env"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.url}/of/mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=9")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "openinference.project.name=sums")
    check_traces(TracesConfig(export="env"))
    export = _export(store, "env")
    export.send([_finished(store, "a")])
    export.close()
    assert collector.paths == ["/of/mine/v1/traces"]
    assert collector.headers[0]["x-tenant"] == "9"
    assert collector.resource()["openinference.project.name"] == "sums"


def test_a_missing_exporter_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_client, "is_installed", lambda name: False)
    check_traces(TracesConfig())
    with raises_coded(ConfigError, "not_installed", "traces.export") as caught:
        check_traces(TracesConfig(export="http://127.0.0.1:6006"))
    assert "lightning-jax[otlp]" in str(caught.value)


def test_headers_are_sent_and_never_saved(
    store: Store, collector: Collector, tmp_path: Path
) -> None:
    settings = [f"traces.export={collector.url}", "traces.headers=[authorization=Bearer hunter2]"]
    config = load_config(Config, settings)
    save_config(config, tmp_path / "config.yaml")
    assert "hunter2" not in (tmp_path / "config.yaml").read_text() + repr(config)
    for of_run in (config, load_config(Config, [str(tmp_path / "config.yaml")])):
        export = TraceExport(of_run.traces, store, tiny_tokenizer(), "")
        export.send([_finished(store, str(len(collector.requests)))])
        export.close()
    first, second = collector.headers
    assert first["authorization"] == "Bearer hunter2"
    assert "authorization" not in second


@pytest.mark.parametrize("header", ["authorization", "a b=c", "a=b\r\nc: d"])
def test_headers_that_are_none_are_refused(header: str) -> None:
    with raises_coded(FieldError, "invalid", "headers"):
        TracesConfig(headers=(header,))


def test_the_agent_has_the_name_of_its_settings() -> None:
    assert agent_name(AgentConfig(function="/home/me/agent.py:run")) == "agent.py:run"
    assert agent_name(AgentConfig(command=("bin/agent", "--fast"))) == "agent"
    assert agent_name(AgentConfig()) == ""
