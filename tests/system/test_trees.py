"""Tests of directories that a foreign program filled: their size, and their removal."""

import os
import stat
from pathlib import Path

import pytest

from lightning_jax.system.trees import is_within, remove_tree

MANY = 10**9


def nest(folder: Path, name: str, number: int) -> None:
    """Nest directories below `folder`, deeper than a path can name, with a file at the end."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        for _ in range(number):
            os.mkdir(name)
            os.chdir(name)
        Path("file").write_text("x" * 10_000)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(("name", "number"), [("d", 1200), ("long" * 50, 60)])
def test_deep_directories_are_removed_and_not_within(
    tmp_path: Path, name: str, number: int
) -> None:
    folder = tmp_path / "box"
    folder.mkdir()
    assert is_within(folder, MANY, MANY, 100)
    nest(folder, name, number)
    assert not is_within(folder, MANY, MANY, 100)
    (folder / "removed-0").touch()  # a name that the removal would take
    os.symlink(tmp_path, folder / "link")
    (tmp_path / "kept").touch()
    remove_tree(folder)
    assert os.listdir(tmp_path) == ["kept"]


def test_path_that_is_no_directory_is_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    os.symlink(tmp_path / "kept", tmp_path / "link")
    (tmp_path / "file").touch()
    for name in ("link", "file", "absent"):
        remove_tree(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"]


def test_directories_without_rights_are_measured_and_removed(tmp_path: Path) -> None:
    inner = tmp_path / "box/locked/inner"
    inner.mkdir(parents=True)
    (inner / "file").write_bytes(b"x" * 2**20)
    for path in (inner, inner.parent):
        path.chmod(0)
    assert not is_within(tmp_path / "box", 2**19, MANY, 100)
    assert is_within(tmp_path / "box", 2**21, MANY, 100)
    assert stat.S_IMODE(inner.parent.stat().st_mode) == 0  # as it was
    remove_tree(tmp_path / "box")
    assert os.listdir(tmp_path) == []


def test_number_of_files_is_limited(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).touch()
    assert is_within(tmp_path, MANY, 3, 0) is False  # no entry at level 0
    assert is_within(tmp_path, MANY, 3, 1) and not is_within(tmp_path, MANY, 2, 1)
