"""Sinks of a run's metrics, each with a thread, so that no sink can hold up or end the run."""

import json
import logging
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
from lightning_jax.train.sinks.feed import Action, Feed
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
        self._feeds = [
            Feed(name, partial(self._open, name, make), partial(_warn, name), MAX_WAITING)
            for name, make in sinks.items()
        ]

    def write(self, row: Row) -> None:
        """Pass a row to all sinks. Never waits."""
        for feed in self._feeds:
            feed.put(lambda sink: sink.write(row))

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
            feed.close(
                lambda sink: sink.close(results, status),
                deadline=deadline,
                limit="metrics.close_s",
            )

    def _open(self, name: str, make: MakeSink) -> tuple[Sink, Sequence[Action[Sink]]]:
        """Return the sink, which writes the rows that it lacks first, and remember it as open."""
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
        earlier = () if is_known else self._earlier
        return sink, [lambda sink, row=row: sink.write(row) for row in earlier]


def _warn(name: str, reason: str) -> None:
    log.warning(
        "metrics sink %s failed (%s); the run continues, and metrics.jsonl has every row",
        name,
        reason,
        extra={"event": "sink_failed", "sink": name, "reason": reason},
    )


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
