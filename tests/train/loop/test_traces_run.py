"""Tests of runs that send their rollouts to a collector, and of one whose collector hangs."""

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_agent
from log_events import records
from opentelemetry import trace
from otlp_collector import Collector, open_collector, values_of
from toy_runs import TASKS, ahead_config

from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.traces.config import TracesConfig
from lightning_jax.traces.store import Store
from lightning_jax.train.config import CheckpointConfig, Config, EvalConfig
from lightning_jax.train.directory import STORE
from lightning_jax.train.loop import trainer
from lightning_jax.train.loop.inference import evaluate
from lightning_jax.train.sinks.otlp_client import EXPORTER
from lightning_jax.train.watch.metrics import read_metrics

pytest.importorskip(EXPORTER, reason="of the extra otlp")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with open_collector() as place:
        yield place


def _config(directory: Path, url: str, close_s: float = 10.0) -> Config:
    return dataclasses.replace(
        ahead_config(directory / "run"),
        num_steps=2,
        agent=AgentConfig(f"{toy_agent.__file__}:traced"),
        eval=EvalConfig(every=0, num_tasks=2, at_start=True),
        checkpoint=CheckpointConfig(every=100),
        traces=TracesConfig(export=url, close_s=close_s),
    )


def test_each_rollout_of_a_run_is_one_trace(tmp_path: Path, collector: Collector) -> None:
    provider = trace.get_tracer_provider()
    rows = asyncio.run(trainer.train(_config(tmp_path, collector.url), TASKS, TASKS))
    assert trace.get_tracer_provider() is provider
    roots = collector.roots()
    assert Counter(root["lightning.phase"] for root in roots.values()) == {"train": 12, "eval": 4}
    store = Store(tmp_path / "run" / STORE, read_only=True)
    for rollout in store.rollouts():
        root = roots[rollout.rollout_id]
        assert root["lightning.reward"] == rollout.reward
        assert root["lightning.status"] == "scored"
        assert root["lightning.version"] == rollout.step
        assert ("lightning.advantage" in root) == (rollout.phase == "train")
    store.close()
    groups: dict[str, list[float]] = {}
    for root in roots.values():
        if root["lightning.phase"] == "train":
            groups.setdefault(root["lightning.group_id"], []).append(root["lightning.advantage"])
    assert all(sum(group) == pytest.approx(0, abs=1e-5) for group in groups.values())
    for span in (span for span in collector.spans if not span.parent_span_id):
        call, theirs = sorted(collector.below(span), key=lambda s: s.name.startswith("look up"))
        assert values_of(call)["gen_ai.operation.name"] == "chat"
        assert theirs.name.startswith("look up")
        for below in (call, theirs):
            assert below.parent_span_id == span.span_id
            assert span.start_time_unix_nano <= below.start_time_unix_nano
            assert below.end_time_unix_nano <= span.end_time_unix_nano
    assert rows[-1]["train/trace_spans_lost"] == 0.0
    assert len(collector.spans) == 48


def test_a_run_goes_on_beside_a_collector_that_hangs(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.goes_on.clear()
    config = _config(tmp_path, collector.url, close_s=0.1)
    started = time.monotonic()
    asyncio.run(trainer.train(config, TASKS, TASKS))
    took_s = time.monotonic() - started
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")] == [0, 1, 2]
    (lost,) = records(caplog, "traces_lost")
    assert lost.number == 48
    assert took_s < 60


async def test_an_evaluation_is_sent_when_it_ends(tmp_path: Path, collector: Collector) -> None:
    config = _config(tmp_path, collector.url)
    rollouts, _ = await evaluate(config, TASKS)
    assert collector.roots().keys() == {rollout.rollout_id for rollout in rollouts}
