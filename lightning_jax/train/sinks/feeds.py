"""Threads that pass a run's metrics to its sinks, so that no sink can hold up or end the run."""

import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_jax.settings import ConfigError, flatten, read_saved
from lightning_jax.settings.loading import check_reference, is_installed, load_function
from lightning_jax.settings.schema import PathKind
from lightning_jax.system.files import write_whole
from lightning_jax.train.config import MetricsConfig
from lightning_jax.train.directory import SETTINGS, SINKS_OPENED
from lightning_jax.train.sinks.base import ResultTable, Row, RunIdentity, Sink, Status
from lightning_jax.train.sinks.packages import MlflowSink, TensorBoardSink, TrackioSink, WandbSink
from lightning_jax.types import Metrics

log = logging.getLogger(__name__)

MAX_WAITING = 1000  # rows that a sink may be behind
MakeSink = Callable[[RunIdentity], Sink]
# Each needs the package of its name. `metrics.jsonl` is not one of them: a run always has it.
SINKS: dict[str, MakeSink] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}


class Feed:
    """Thread that opens a sink, writes rows to it and closes it. `earlier` rows come first.

    Rows that the sink does not take are counted, and the first reason is logged.
    """

    def __init__(self, name: str, open_sink: Callable[[], tuple[Sink, Sequence[Row]]]) -> None:
        """`open_sink` returns the sink and the rows to write first."""
        self.name, self.num_lost = name, 0
        self._lock, self._has_warned = threading.Lock(), False
        self._actions: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(
            target=self._run, args=(open_sink,), name=f"sink-{name}", daemon=True
        )
        self._thread.start()

    def write(self, row: Row) -> None:
        """Pass on a row. Never waits."""
        try:
            self._actions.put_nowait(lambda sink: sink.write(row))
        except queue.Full:
            self._lose(1, f"it is {MAX_WAITING} rows behind")

    def close(self, results: ResultTable, status: Status, deadline: float) -> None:
        """Close the sink, and wait for it until a time of the monotonic clock."""
        try:
            for action in (lambda sink: sink.close(results, status), None):
                self._actions.put(action, timeout=max(deadline - time.monotonic(), 0.0))
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._lose(self._actions.qsize(), "it was not done in metrics.close_s")

    def _run(self, open_sink: Callable[[], tuple[Sink, Sequence[Row]]]) -> None:
        opened = self._attempt(0, open_sink)
        sink: Sink | None = opened and opened[0]
        if sink is not None:
            for row in opened[1]:
                self._attempt(1, sink.write, row)
        while (action := self._actions.get()) is not None:
            if sink is None:
                self._lose(1, "it was not opened")
            else:
                self._attempt(1, action, sink)

    def _attempt(self, num_rows: int, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a sink's package)
            self._lose(num_rows, f"{type(error).__name__}: {error}")

    def _lose(self, num_rows: int, reason: str) -> None:
        with self._lock:
            self.num_lost += num_rows
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            log.warning(
                "metrics sink %s failed (%s); the run continues, and metrics.jsonl has every row",
                self.name,
                reason,
                extra={"event": "sink_failed", "sink": self.name, "reason": reason},
            )


class Feeds:
    """Feeds of a run's sinks. `earlier` are its rows before `first_step`.

    A sink that has not been opened for this directory before gets these rows, too.
    """

    def __init__(
        self, config: MetricsConfig, directory: Path, first_step: int, earlier: Sequence[Row]
    ) -> None:
        self._config, self._directory, self._first_step = config, directory, first_step
        self._earlier = tuple(earlier)
        self._lock = threading.Lock()
        sinks: dict[str, MakeSink] = {name: SINKS[name] for name in SINKS if name in config.sinks}
        for reference in filter(_is_user_sink, config.sinks):
            sinks[Path(reference).name] = lambda run, ref=reference: load_function(ref)(run)
        self._opened = _read(directory / SINKS_OPENED) if sinks else {}
        self._feeds = [Feed(name, partial(self._open, name, sinks[name])) for name in sinks]

    def write(self, row: Row) -> None:
        """Pass a row to all sinks. Never waits."""
        for feed in self._feeds:
            feed.write(row)

    def counts(self) -> Metrics:
        """Return the number of rows that each failing sink has not taken."""
        return {
            f"train/sink_rows_lost/sink={feed.name}": float(feed.num_lost)
            for feed in self._feeds
            if feed.num_lost
        }

    def close(self, results: ResultTable, status: Status) -> None:
        """Close all sinks. Return when they are done, after `metrics.close_s` at the latest."""
        deadline = time.monotonic() + self._config.close_s
        for feed in self._feeds:
            feed.close(results, status, deadline)

    def _open(self, name: str, make: MakeSink) -> tuple[Sink, Sequence[Row]]:
        """Return the sink and the rows that it lacks, and remember that it is open."""
        opened_before = self._opened["sinks"]
        is_known = name in opened_before
        run = RunIdentity(
            id=self._opened["id"],
            name=self._config.name or self._directory.absolute().name,
            project=self._config.project,
            directory=self._directory.absolute(),
            settings=flatten(read_saved(self._directory / SETTINGS)),
            first_step=self._first_step,
            is_known=is_known,
        )
        sink = make(run)
        with self._lock:
            if not is_known:
                opened_before.append(name)
            write_whole(self._directory / SINKS_OPENED, json.dumps(self._opened) + "\n")
        return sink, () if is_known else self._earlier


def _read(path: Path) -> dict[str, Any]:
    """Return the id of the run directory for sinks, and the sinks that have been opened."""
    try:
        saved = json.loads(path.read_text())
        return {"id": str(saved["id"]), "sinks": [str(name) for name in saved["sinks"]]}
    except (OSError, ValueError, TypeError, KeyError):  # missing or damaged
        return {"id": secrets.token_hex(4), "sinks": []}


def _is_user_sink(name: str) -> bool:
    """Return True for FILE:CLASS."""
    return ":" in name


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError for the first sink whose package or file is missing. Imports none."""
    for name in names:
        if _is_user_sink(name):
            check_reference(name, PathKind.CLASS)
        if name in SINKS and not is_installed(name):
            raise ConfigError.not_installed(
                "metrics.sinks",
                f"metrics.sinks names {name}, which is not installed; run `pip install {name}`, or "
                f"remove {name} from metrics.sinks.",
            )
