"""Tests of what a run's directory tells."""

from pathlib import Path

import pytest
from coded import raises_coded

from lightning_jax.settings import ConfigError
from lightning_jax.train.directory import EXPORTED, find_weights, newest_checkpoint


def test_newest_checkpoint_counts_whole_ones_only(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") == -1
    for name in ("4", "12", "20.draft"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 12


@pytest.mark.parametrize("text", ["", "[]", '{"step": []}', '{"steps": 3}'])
def test_a_damaged_file_about_the_export_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / EXPORTED).write_text(text)
    with raises_coded(ConfigError, "malformed", str(tmp_path / EXPORTED)):
        find_weights(tmp_path)
