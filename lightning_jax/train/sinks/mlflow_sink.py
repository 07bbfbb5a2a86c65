"""Sink for MLflow, at MLFLOW_TRACKING_URI or MLflow's default."""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_jax.train.sinks.base import ResultTable, Row, RunIdentity, Status

log = logging.getLogger(__name__)

TAG = "lightning_jax.id"  # finds the MLflow run when ours resumes
MAX_METRICS, MAX_PARAMS = 1000, 100  # of one request
STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)  # in names


class MlflowSink:
    """Run of MLflow with the settings as parameters. A sign that names may not have becomes _."""

    def __init__(self, run: RunIdentity) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._metric, self._client = Metric, MlflowClient()
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(experiment, tags={TAG: run.id}, run_name=run.name)
            self._id = made.info.run_id
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
