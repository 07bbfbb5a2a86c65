"""The notebooks run from top to bottom on a small run directory."""

import json
from pathlib import Path

import pytest

from lightning_jax.metrics import MetricsLog
from lightning_jax.store import Store
from lightning_jax.types import Rollout

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write(0, {"eval/reward_mean": 0.25, "eval/reward_stderr": 0.1, "train/entropy": 1.0})
    store = Store(tmp_path / "store.sqlite")
    store.add_rollout(Rollout("r", "t", "g", "train", 0, 0, 1, "queued"))
    store.close()
    monkeypatch.setenv("RUN", str(tmp_path))
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["rows"] == log.rows
    assert names["transitions"] == ()
    assert (tmp_path / "notebook.png").exists()
