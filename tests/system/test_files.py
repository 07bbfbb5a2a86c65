"""Tests of files: writes are atomic, and files are private to their owner."""

import stat
from pathlib import Path

import pytest
from log_events import events

from lightning_jax.system.files import (
    SHARED,
    create_private,
    make_private,
    replacing,
    warn_if_open,
    write_whole,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_failed_write_leaves_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    write_whole(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


def test_files_are_private_whatever_they_were_before(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("old")
    path.chmod(0o644)
    (tmp_path / ".a.yaml.tmp").write_text("of a killed process")
    write_whole(path, "new")
    assert (path.read_text(), mode(path)) == ("new", 0o600)
    write_whole(path, "page", SHARED)
    assert mode(path) & 0o600 == 0o600 and mode(path) != 0o600


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    write_whole(tmp_path / "b", "new")
    assert (tmp_path / "b").is_symlink() and (tmp_path / "a").read_text() == "new"


def test_device_is_written_itself() -> None:
    write_whole(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()


def test_new_directory_is_private_and_an_open_one_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_private(tmp_path / "runs" / "x")
    make_private(tmp_path / "runs" / "x")
    warn_if_open(tmp_path / "runs" / "x")
    assert mode(tmp_path / "runs" / "x") == 0o700 and not caplog.records
    (tmp_path / "runs" / "x").chmod(0o755)
    make_private(tmp_path / "runs" / "x")
    warn_if_open(tmp_path / "runs" / "x")
    assert events(caplog) == ["directory_open"] and mode(tmp_path / "runs" / "x") == 0o755


def test_file_that_is_there_is_not_emptied(tmp_path: Path) -> None:
    create_private(tmp_path / "store")
    assert mode(tmp_path / "store") == 0o600
    (tmp_path / "store").write_text("kept")
    create_private(tmp_path / "store")
    assert (tmp_path / "store").read_text() == "kept"
