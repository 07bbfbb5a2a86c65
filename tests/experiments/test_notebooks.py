"""Tests of the notebooks, run from top to bottom in a kernel with tiny settings."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lightning_jax.models.formats.load import save_hf
from lightning_jax.testing.tiny import TINY_RUN, tiny_model

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
BETWEEN = "%reset -f\n%env SETTINGS=mesh.fsdp=1"


def _run(*names: str) -> list[str]:
    """Return the output of each notebook.

    They run one after the other in one kernel, which deletes all names in between. Shared imports
    thus run only once. The environment's settings are those of the first notebook.
    """
    notebooks = [nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4) for name in names]
    whole = nbformat.v4.new_notebook()
    for notebook in notebooks:
        nbformat.validate(notebook)
        whole.cells += [*notebook.cells, nbformat.v4.new_code_cell(BETWEEN)]
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(whole, timeout=300, resources=resources).execute()
    return ["\n".join(map(_output, notebook.cells)) for notebook in notebooks]


def _output(cell: nbformat.NotebookNode) -> str:
    outputs = cell.get("outputs", [])
    return "\n".join(output.get("text", "") or str(output.get("data", "")) for output in outputs)


@pytest.mark.slow
def test_an_agent_is_trained_its_run_analysed_and_a_larger_one_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hf(tmp_path / "tiny", tiny_model(num_layers=1))
    settings = TINY_RUN | {
        "run_dir": tmp_path / "run",
        "model.name": tmp_path / "tiny",
        "eval.num_tasks": 1,
    }
    monkeypatch.setenv("SETTINGS", " ".join(f"{key}={value}" for key, value in settings.items()))
    monkeypatch.setenv("RUNS", str(tmp_path / "run"))
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, like a reader's machine
    monkeypatch.setenv("MODEL", str(tmp_path / "tiny"))
    monkeypatch.setenv("STEPS", "2")
    trained, analysed, looped, planned = _run("quickstart", "analysis", "loop", "tpu")
    assert "(n=1)" in trained and "image/png" in trained
    assert "rollouts: 4 scored" in trained  # two in training, one before and one after
    assert "train-00000-000-0" in trained and "advantage" in trained
    assert "image/png" in analysed and "rollouts: 4 scored" in analysed
    assert "train-00000-000-00-1 call 1" in analysed
    assert "step 1: reward " in looped and "= ?\nassistant\n" in looped
    assert "GiB" in planned


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_stored_outputs_are_whole_and_name_no_machine(path: Path) -> None:
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    if outputs:  # those of one execution from top to bottom
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert re.findall(r"/(?:home|root|work|tmp|Users)/", str(outputs)) == []


def test_the_loop_of_the_readme_is_that_of_the_notebook() -> None:
    """So that running the notebook tests both."""
    readme = (NOTEBOOKS.parent / "README.md").read_text()
    (block,) = (part for part in readme.split("```python\n") if part.startswith("import lightning"))
    shown = {line.strip() for line in block.split("```")[0].splitlines()}
    loop = nbformat.read(NOTEBOOKS / "loop.ipynb", as_version=4)
    run = {line.strip() for cell in loop.cells for line in cell.source.splitlines()}
    own = ("model, algorithm = ", "for step in ", "print(step, ")
    assert {line for line in shown - run if not line.startswith(own)} == {
        "async with lj.Engine(model) as engine, lj.Gateway(engine) as gateway:",
        "trajectories, metrics = await lj.run_rollouts(run, tasks, gateway, group_size=8)",
    }
