"""Tests of the threads that feed sinks: one that fails or hangs does not hold up the run."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from coded import raises_coded
from docs_pages import fenced
from list_sink import ListSink
from log_events import records

from lightning_jax.settings import ConfigError, load_config, save_config
from lightning_jax.train.config import Config, MetricsConfig
from lightning_jax.train.directory import METRICS, SETTINGS
from lightning_jax.train.sinks import check_sinks
from lightning_jax.train.sinks.base import Row, RunIdentity
from lightning_jax.train.sinks.feeds import MAX_WAITING, SINKS
from lightning_jax.train.watch.metrics import MetricsLog, read_metrics

LOST = "train/sink_rows_lost/sink=wandb"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ListSink]]:
    """Return a function that replaces the sink `wandb`, and returns the list of those opened."""

    def replaced(before_write: Callable[[Row], object] = lambda row: None) -> list[ListSink]:
        found: list[ListSink] = []

        def make(run: RunIdentity) -> ListSink:
            found.append(ListSink(run, before_write))
            return found[-1]

        monkeypatch.setitem(SINKS, "wandb", make)
        return found

    return replaced


def _log(directory: Path, first_step: int = 0, **settings: object) -> MetricsLog:
    config = MetricsConfig(sinks=["wandb"], **settings)  # type: ignore[arg-type]
    save_config(Config(run_dir=str(directory), metrics=config), directory / SETTINGS)
    return MetricsLog(directory / METRICS, first_step, config)


def test_sink_gets_name_settings_rows_and_results(
    opened: Callable[..., list[ListSink]], tmp_path: Path
) -> None:
    sinks = opened()
    (tmp_path / "first").mkdir()
    log = _log(tmp_path / "first")
    log.after_step(0, {"a/b": 1.0})
    log.after_step(1, {"eval/reward_mean": 0.5, "eval/reward_stderr": 0.1, "eval/num_tasks": 4})
    log.close("failed")
    (sink,) = sinks
    assert (sink.run.name, sink.run.project, sink.run.first_step) == ("first", "lightning_jax", 0)
    assert sink.run.settings["num_steps"] == 20 and not sink.run.is_known
    assert sink.rows == read_metrics(tmp_path / "first" / METRICS)
    assert sink.end is not None and sink.end[1] == "failed"
    assert dict(zip(sink.end[0].columns, sink.end[0].rows[0], strict=True))["reward"] == 0.5


def test_new_sink_of_a_resumed_run_gets_the_earlier_rows(
    opened: Callable[..., list[ListSink]], tmp_path: Path
) -> None:
    before = MetricsLog(tmp_path / METRICS, 0)
    for step in range(3):
        before.after_step(step, {"a/b": 1.0})
    sinks = opened()
    for first in (2, 3):
        log = _log(tmp_path, first)
        log.after_step(first, {"a/b": 1.0})
        log.close("finished")
    new, known = sinks
    assert [row["step"] for row in new.rows] == [0, 1, 2]
    assert [row["step"] for row in known.rows] == [3]
    assert known.run.is_known and known.run.id == new.run.id


def test_failing_sink_is_logged_once_and_counted(
    opened: Callable[..., list[ListSink]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = threading.Semaphore(0)

    def refuse(row: Row) -> None:
        seen.release()
        if row["step"] < 2:
            raise ConnectionError("no route")

    sinks = opened(refuse)
    log = _log(tmp_path)
    for step in range(2):
        log.after_step(step, {"a/b": 1.0})
        assert seen.acquire(timeout=30)
    while log.sinks.counts() != {LOST: 2.0}:
        time.sleep(0.01)
    log.after_step(2, {"a/b": 1.0})
    log.close("finished")
    (record,) = records(caplog, "sink_failed")
    assert record.sink == "wandb" and "ConnectionError" in record.reason
    assert [row["step"] for row in sinks[0].rows] == [2]
    assert [row.get(LOST, 0.0) for row in read_metrics(tmp_path / METRICS)][-1] == 2.0
    assert sinks[0].end is not None


def test_sink_that_cannot_be_opened_loses_all_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: RunIdentity) -> ListSink:
        raise SystemExit("not logged in")

    monkeypatch.setitem(SINKS, "wandb", refuse)
    log = _log(tmp_path)
    for step in range(3):
        log.after_step(step, {"a/b": 1.0})
    log.close("finished")
    (record,) = records(caplog, "sink_failed")
    assert "not logged in" in record.reason
    assert log.sinks.counts()[LOST] >= 3.0
    assert len(read_metrics(tmp_path / METRICS)) == 3


def test_hanging_sink_holds_up_neither_steps_nor_the_end(
    opened: Callable[..., list[ListSink]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    opened(lambda row: never.wait(60))
    log = _log(tmp_path, close_s=0.2)
    longest = 0.0
    for step in range(MAX_WAITING + 10):
        started = time.monotonic()
        log.sinks.write({"step": step})
        longest = max(longest, time.monotonic() - started)
    started = time.monotonic()
    log.close("finished")
    assert longest < 0.5 and time.monotonic() - started < 5.0
    assert log.sinks.counts()[LOST] >= MAX_WAITING
    assert len(records(caplog, "sink_failed")) == 1
    never.set()


def test_missing_package_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_jax.train.sinks.feeds.is_installed", lambda name: False)
    check_sinks(["jsonl"])
    with raises_coded(ConfigError, "not_installed", "metrics.sinks") as caught:
        check_sinks(["jsonl", "mlflow"])
    assert "pip install mlflow" in str(caught.value)


def test_unknown_sink_is_refused() -> None:
    with raises_coded(ConfigError, "unknown", "metrics.sinks"):
        load_config(Config, ["metrics.sinks=[jsonl,visdom]"])


SINK = """
import json


class Mine:
    def __init__(self, run):
        self.path = run.directory / "mine.jsonl"

    def write(self, row):
        if "a/broken" in row:
            raise ValueError("broken")
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\\n")

    def close(self, results, status):
        self.path.with_suffix(".end").write_text(status)
"""


def test_a_sink_of_the_reader_gets_rows_and_loses_those_it_raises_for(tmp_path: Path) -> None:
    (tmp_path / "sink_of_mine.py").write_text(SINK)
    config = MetricsConfig(sinks=["jsonl", f"{tmp_path}/sink_of_mine.py:Mine"])
    save_config(Config(run_dir=str(tmp_path), metrics=config), tmp_path / SETTINGS)
    check_sinks(config.sinks)
    log = MetricsLog(tmp_path / METRICS, 0, config)
    log.after_step(0, {"a/b": 1.0})
    log.after_step(1, {"a/broken": 1.0})
    until_lost = time.monotonic() + 30
    while not log.sinks.counts() and time.monotonic() < until_lost:
        time.sleep(0.01)
    log.after_step(2, {"a/b": 2.0})
    log.close("stopped")
    *_, last = rows = read_metrics(tmp_path / METRICS)
    assert last["train/sink_rows_lost/sink=sink_of_mine.py:Mine"] == 1.0
    assert read_metrics(tmp_path / "mine.jsonl") == [rows[0], rows[2]]
    assert (tmp_path / "mine.end").read_text() == "stopped"


def test_a_sink_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sink_of_mine.py").write_text(SINK)
    for name, reason in (("sink_of_mine.py:Absent", "no_such_function"), ("no.py:A", "not_found")):
        with raises_coded(ConfigError, reason):
            check_sinks([f"{tmp_path}/{name}"])


def test_the_sink_of_the_page_keeps_evaluations(tmp_path: Path) -> None:
    (tmp_path / "my_sink.py").write_text(fenced("docs/howto/add_a_metric_sink.md", "python")[0])
    config = MetricsConfig(sinks=[f"{tmp_path}/my_sink.py:Table"])
    save_config(Config(run_dir=str(tmp_path), metrics=config), tmp_path / SETTINGS)
    log = MetricsLog(tmp_path / METRICS, 0, config)
    log.after_step(0, {"a/b": 1.0})
    log.after_step(1, {"eval/reward_mean": 0.5, "eval/reward_stderr": 0.1, "eval/num_tasks": 4})
    log.close("finished")
    assert (tmp_path / "evaluations.csv").read_text().split() == ["1,0.5"]
    assert (tmp_path / "results.txt").read_text().startswith("finished\n")
