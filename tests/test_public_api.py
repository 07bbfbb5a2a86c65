"""Tests of the public names: all load, cheaply and lazily, and a typo is pointed out."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_jax as lj

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", lj.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(lj, name) is not None and name in dir(lj)


def test_type_checkers_see_the_names_that_load() -> None:
    """Each line of the stub loads what it imports, and is written as a public import."""
    stub = Path(lj.__file__).with_suffix(".pyi").read_text()
    lines = [line.split() for line in stub.splitlines() if line.startswith("from ")]
    assert [line[-1] for line in lines] == lj.__all__
    for _, module, _, attribute, _, name in lines:
        loaded = getattr(lj, name)  # before the package is asked, which loads no modules
        expected = getattr(importlib.import_module(module), attribute)
        assert loaded is (lj.train if name == "train" else expected)


def test_importing_the_package_loads_neither_jax_nor_its_rooms() -> None:
    code = "import sys, lightning_jax; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = done.stdout.split()
    assert [name for name in loaded if name.startswith(("jax", "numpy", "lightning_jax."))] == []


def test_a_misspelled_name_is_answered_with_the_closest_one() -> None:
    with pytest.raises(AttributeError, match="load_model"):
        _ = lj.load_modle  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(lj, "zzz")


def test_the_room_train_can_be_called() -> None:
    from lightning_jax.train import config
    from lightning_jax.train.loop import trainer

    assert lj.train.loop.trainer is trainer  # pyright: ignore[reportFunctionMemberAccess]
    running = lj.train(config.Config(), [], [])
    assert inspect.iscoroutine(running) and running.__name__ == trainer.train.__name__
    running.close()
