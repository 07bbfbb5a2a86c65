"""Sink for TensorBoard: event files in the run directory."""

import time
from collections.abc import Mapping
from typing import Any

from lightning_jax.train.sinks.base import ResultTable, Row, RunIdentity, Status

DIRECTORY = "tensorboard"


class TensorBoardSink:
    """Writer of scalars, of the settings as hyperparameters and text, and of the results."""

    def __init__(self, run: RunIdentity) -> None:
        import numpy as np
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportMissingImports]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportMissingImports]
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # pyright: ignore[reportMissingImports]
        from tensorboard.plugins.text.summary_v2 import text_pb  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

        self._event, self._summary = Event, Summary
        self._text_pb = lambda tag, text: text_pb(tag, np.array([text], dtype=object))
        self._writer = EventFileWriter(str(run.directory / DIRECTORY))
        self._step = run.first_step
        if run.is_known:  # hides rows of steps that will run again
            self._add(session_log=SessionLog(status=SessionLog.START))
        self._add(summary=hparams_pb(_plain(run.settings), trial_id=run.id))
        lines = (f"{key}: {value}" for key, value in run.settings.items())
        self._add_text("settings", "\n".join((run.name, *lines)))
        self._writer.flush()

    def write(self, row: Row) -> None:
        """Write a scalar for each metric."""
        self._step = int(row["step"])
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "step"
        ]
        self._add(summary=self._summary(value=scalars))
        self._writer.flush()

    def close(self, results: ResultTable, status: Status) -> None:
        """Write the results as text, and close the file."""
        self._add_text("results", f"{status}\n{results.text}")
        self._writer.close()

    def _add_text(self, tag: str, text: str) -> None:
        block = "".join(f"    {line}\n" for line in text.splitlines())  # code in Markdown
        self._add(summary=self._text_pb(tag, block))

    def _add(self, **event: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=self._step, **event))


def _plain(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the settings with other values than numbers as text."""
    numbers = (bool, int, float)
    return {k: v if isinstance(v, numbers) else str(v) for k, v in settings.items()}
