"""Sinks of packages that are imported when a sink is opened.

MLflow keeps a run at MLFLOW_TRACKING_URI or its default. trackio keeps one in its local database,
or in the Space or server that its variables name.
"""

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_jax.train.sinks.base import ResultTable, Row, RunIdentity, Status

log = logging.getLogger(__name__)

TENSORBOARD_DIRECTORY = "tensorboard"
TAG = "lightning_jax.id"  # finds the MLflow run when ours resumes
MAX_METRICS, MAX_PARAMS = 1000, 100  # of one request
STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)  # in names


class TensorBoardSink:
    """Writer of event files in the run directory.

    They hold scalars, the settings as hyperparameters and text, and the results.
    """

    def __init__(self, run: RunIdentity) -> None:
        import numpy as np
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportMissingImports]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportMissingImports]
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # pyright: ignore[reportMissingImports]
        from tensorboard.plugins.text.summary_v2 import text_pb  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

        self._event, self._summary = Event, Summary
        self._text_pb = lambda tag, text: text_pb(tag, np.array([text], dtype=object))
        self._writer = EventFileWriter(str(run.directory / TENSORBOARD_DIRECTORY))
        self._step = run.first_step
        if run.is_known:  # hides rows of steps that will run again
            self._add(session_log=SessionLog(status=SessionLog.START))
        numbers = (bool, int, float)  # other values are text
        values = {k: v if isinstance(v, numbers) else str(v) for k, v in run.settings.items()}
        self._add(summary=hparams_pb(values, trial_id=run.id))
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


class WandbSink:
    """Run of W&B with the id of the run directory.

    Without an API key it is recorded offline, because W&B would otherwise wait for someone to type
    one.
    """

    def __init__(self, run: RunIdentity) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        is_offline = not os.environ.get("WANDB_MODE") and not _has_key()
        self._table = wandb.Table
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            config=dict(run.settings),
            dir=str(run.directory),
            mode="offline" if is_offline else None,
            resume="allow",
            reinit="create_new",
            save_code=False,
            # The metadata would hold the command line, which may hold a key.
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_disable_meta=True
            ),
        )
        # W&B's own step cannot go back, but a resumed run does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        directory = Path(self._run.dir).parent
        log.info("wandb: %s", f"offline in {directory}" if self._run.offline else self._run.url)

    def write(self, row: Row) -> None:
        """Log the row."""
        self._run.log(dict(row))

    def close(self, results: ResultTable, status: Status) -> None:
        """Log the results as a table, and wait for the upload."""
        if results.rows:
            rows = [list(row) for row in results.rows]
            self._run.log({"results": self._table(columns=list(results.columns), data=rows)})
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _has_key() -> bool:
    """Return whether W&B has a key of this user. Asks nobody."""
    import wandb  # pyright: ignore[reportMissingImports]

    try:
        return wandb.login(prompt=False, verify=False)
    except TypeError:  # an older release
        return bool(wandb.api.api_key)


class MlflowSink:
    """Run of MLflow with the settings as parameters. A sign that names may not have becomes _."""

    def __init__(self, run: RunIdentity) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric, self._client = Metric, MlflowClient()
        stored = self._client.get_experiment_by_name(run.project)
        experiment = stored.experiment_id if stored else self._client.create_experiment(run.project)
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            mlflow_run = self._client.create_run(experiment, tags={TAG: run.id}, run_name=run.name)
            self._id = mlflow_run.info.run_id
            params = [Param(_name(key), str(value)) for key, value in run.settings.items()]
            for part in _parts(params, MAX_PARAMS):
                self._client.log_batch(self._id, params=part)
        self._client.log_dict(self._id, dict(run.settings), "settings.yaml")
        log.info("mlflow: run %s of experiment %s", self._id, run.project)

    def write(self, row: Row) -> None:
        """Log the metrics of the row."""
        now_ms, step = int(time.time() * 1000), int(row["step"])
        metrics = [
            self._metric(_name(name), value, now_ms, step)
            for name, value in row.items()
            if name != "step"
        ]
        for part in _parts(metrics, MAX_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def close(self, results: ResultTable, status: Status) -> None:
        """Log the results as a table and as text, and end the run."""
        if results.rows:
            values = zip(*results.rows, strict=True)
            data = {
                name: list(column) for name, column in zip(results.columns, values, strict=True)
            }
            self._client.log_table(self._id, data, "results.json")
        self._client.log_text(self._id, results.text, "results.txt")
        self._client.set_terminated(self._id, STATUSES[status])


def _name(name: str) -> str:
    return _FORBIDDEN.sub("_", name.replace("=", ":"))


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class TrackioSink:
    """Run of trackio. Its name ends in the run's id, because trackio finds runs by their names."""

    def __init__(self, run: RunIdentity) -> None:
        # trackio drops values while another thread imports this module, to draw the first curves.
        import matplotlib.figure  # noqa: F401
        import trackio  # pyright: ignore[reportMissingImports]

        self._table = trackio.Table
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )
        self._step = run.first_step

    def write(self, row: Row) -> None:
        """Log the row."""
        self._step = int(row["step"])
        self._run.log({name: v for name, v in row.items() if name != "step"}, step=self._step)

    def close(self, results: ResultTable, status: Status) -> None:
        """Log the results as a table, and wait until all is stored."""
        last: dict[str, Any] = {"status": status}
        if results.rows:
            rows = [list(row) for row in results.rows]
            last["results"] = self._table(columns=list(results.columns), data=rows)
        self._run.log(last, step=self._step)
        self._run.finish()
