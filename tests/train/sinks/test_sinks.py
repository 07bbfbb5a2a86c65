"""Tests of the metric sinks against the packages that keep the metrics, without a network.

Each run writes steps 0 to 3, resumes at step 2, writes steps 2 to 4, and ends with an evaluation.
"""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("two_sessions.py")
SECRET = "hunter2hunter2"
Run = Callable[..., Path]

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that writes to a sink in a process of its own, in a new home directory."""

    def written(sink: str, **variables: str) -> Path:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW"))}
        home = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
        done = subprocess.run(
            [sys.executable, SCRIPT, tmp_path, sink, SECRET],
            cwd=tmp_path,
            env=kept | home | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert "failed" not in done.stderr + done.stdout
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) > 3
        assert not [path for path in files if SECRET.encode() in path.read_bytes()]
        return tmp_path

    return written


def test_tensorboard_reads_each_step_once(run: Run) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore[reportMissingImports]
    from tensorboard.util.tensor_util import make_ndarray  # pyright: ignore[reportMissingImports]

    found: Any = EventAccumulator(str(run("tensorboard") / "tensorboard")).Reload()
    rewards = {event.step: event.value for event in found.Scalars("rollout/reward_mean")}
    assert rewards == {step: step / 4 for step in range(5)}
    assert len(found.Scalars("rollout/reward_mean")) == 5
    assert found.Scalars("eval/reward_mean")[0].value == 0.5
    texts = {
        tag: make_ndarray(found.Tensors(tag)[-1].tensor_proto).item().decode()
        for tag in ("settings", "results")
    }
    assert "mine" in texts["settings"] and "num_steps: 5" in texts["settings"]
    assert "finished" in texts["results"] and "0.500" in texts["results"]
    assert "_hparams_/session_start_info" in found.PluginTagToContent("hparams")


def test_wandb_keeps_the_run_offline_without_a_key(run: Run) -> None:
    pytest.importorskip("wandb")
    directory = run("wandb")
    first, second = map(_wandb_records, sorted(directory.glob("wandb/offline-*/*.wandb")))
    (opened,) = (record.run for record in first if record.HasField("run"))
    (resumed,) = (record.run for record in second if record.HasField("run"))
    assert (opened.project, opened.display_name) == ("tests", "mine")
    assert (
        opened.run_id == resumed.run_id == json.loads((directory / "sinks.json").read_text())["id"]
    )
    settings = {item.key: item.value_json for item in opened.config.update}
    assert settings["num_steps"] == "5"
    assert [_steps(records) for records in (first, second)] == [[0, 1, 2, 3], [2, 3, 4]]
    metrics = {tuple(r.metric.name or r.metric.glob_name for r in first if r.HasField("metric"))}
    assert metrics == {("step", "*")}
    (table,) = directory.glob("wandb/offline-*/files/media/table/results_4*")
    row = json.loads(table.read_text())
    assert dict(zip(row["columns"], row["data"][0], strict=True))["reward"] == 0.5


def _wandb_records(path: Path) -> list[Any]:
    """Return the records of an offline run, whose file has LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (room := 2**15 - at % 2**15) < 7:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def _steps(records: list[Any]) -> list[int]:
    rows = [
        {item.nested_key[0]: item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return [int(row["step"]) for row in rows if "rollout/reward_mean" in row]


@pytest.mark.parametrize("store", ["sqlite:///{}/mlflow.db", "file://{}/mlruns"])
def test_mlflow_finds_the_run_again_when_it_resumes(run: Run, store: str, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = store.format(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        run("mlflow", MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")
        client = mlflow.MlflowClient(uri)
        experiment = client.get_experiment_by_name("tests").experiment_id
        (found,) = client.search_runs([experiment])
        history = client.get_metric_history(found.info.run_id, "rollout/reward_mean")
        folder = Path(client.download_artifacts(found.info.run_id, "", tmp_path))
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params["num_steps"] == "5"
    assert {metric.step: metric.value for metric in history} == {s: s / 4 for s in range(5)}
    assert found.data.metrics["train/sink/agent:a"] == 1.0  # MLflow refuses "="
    assert "0.500" in (folder / "results.txt").read_text()
    assert "reward" in json.loads((folder / "results.json").read_text())["columns"]
    assert "num_steps: 5" in (folder / "settings.yaml").read_text()


def test_trackio_resumes_the_run_of_its_directory(run: Run) -> None:
    pytest.importorskip("trackio")
    directory = run("trackio")
    with closing(sqlite3.connect(directory / "trackio/tests.db")) as db:
        rows = db.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id")
        found = [(*which, json.loads(metrics)) for *which, metrics in rows]
        settings = json.loads(db.execute("SELECT config FROM configs").fetchone()[0])
    assert len({run_id for run_id, *_ in found}) == 1
    identity = json.loads((directory / "sinks.json").read_text())["id"]
    assert {name for _, name, *_ in found} == {f"mine-{identity}"}
    steps = [step for *_, step, metrics in found if "rollout/reward_mean" in metrics]
    assert steps == [0, 1, 2, 3, 2, 3, 4]
    assert settings["num_steps"] == 5
    (row,) = found[-1][-1]["results"]["_value"]
    assert (row["step"], row["reward"]) == (5, 0.5)
