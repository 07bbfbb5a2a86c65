"""The notebooks run from top to bottom, in a kernel of their own, with tiny settings."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lightning_jax.models.load import save_hf
from lightning_jax.testing.tiny import tiny_model

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def _run(name: str) -> str:
    """Everything that the notebook prints."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = [output.get("text", "") or str(output.get("data", "")) for output in outputs]
    return "\n".join(said)


def test_an_agent_is_trained_and_its_run_analysed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hf(tmp_path / "tiny", tiny_model())
    settings = {
        "run_dir": tmp_path / "run",
        "num_steps": 1,
        "model.name": tmp_path / "tiny",
        "serve.slots": 2,
        "serve.max_len": 512,
        "rollout.tasks_per_step": 1,
        "rollout.group_size": 2,
        "rollout.max_tokens": 4,
        "batch.row_len": 1024,
        "eval.num_tasks": 1,
        "mesh.fsdp": 1,
    }
    monkeypatch.setenv("SETTINGS", " ".join(f"{key}={value}" for key, value in settings.items()))
    said = _run("quickstart")
    assert "greedy reward on dev tasks" in said and "image/png" in said
    assert "rollouts: 4 scored" in said  # two of training, one before it and one after
    assert "train-00000-000-0" in said and "advantage" in said
    monkeypatch.setenv("RUNS", str(tmp_path / "run"))
    said = _run("analysis")
    assert "image/png" in said and "rollouts: 4 scored" in said
    assert "train-00000-000-00-1 call 1" in said


def test_the_tpu_notebook_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SETTINGS", "mesh.fsdp=1")
    assert "optimizer moments" in _run("tpu")
